"""Remembers blamed requests by their content, so that engines get none of them again for a while.

The content is a hash that workers compute (`pagemill_gateway.relay.relay`). It is remembered with the digest of the
weights that failed: with other weights, such as those of a new version, the request is tried again. Gateways share what
they remember through Redis, if they have one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

KEPT_S = 3600.0
MAX_KEPT = 4096


class Poison(NamedTuple):
    content: bytes
    weights_digest: str
    """Empty if unknown; then no other weights end the refusal."""


class PoisonMemory:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._until: dict[Poison, float] = {}
        self.on_remembered: Callable[[Poison, float], None] = _ignore
        """Called with a blamed request and the time until which it is refused."""

    def remember(self, content: bytes, weights_digest: str) -> None:
        poison, until = Poison(content, weights_digest), self._clock() + KEPT_S
        self.add({poison: until})
        self.on_remembered(poison, until)

    def add(self, known: Mapping[Poison, float]) -> None:
        """Add what is known elsewhere, with the times until which it is refused."""
        self._until.update(known)
        while len(self._until) > MAX_KEPT:
            del self._until[next(iter(self._until))]

    def refused(self, is_served: Container[str]) -> frozenset[bytes]:
        """Return the contents to refuse now. `is_served` has the digests of all weights in use."""
        now = self._clock()
        self._until = {poison: until for poison, until in self._until.items() if until > now}
        return frozenset(
            each.content for each in self._until if not each.weights_digest or each.weights_digest in is_served
        )


def _ignore(poison: Poison, until: float) -> None:
    """No process shares the memory."""
