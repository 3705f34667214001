"""Prefixes that pods do not report yet and will have: those of requests that were dispatched to them.

Each belongs to the decision that brings it about. It ends at once when the request failed or when the pod has reported
the prefix chunk itself, and in any case a while after the first token. It is never mixed into
`brain.placement.prefix_index`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pagemill_gateway.brain.endpoints.dispatches import EXPIRY_S
from pagemill_gateway.brain.placement.prefix_index import clear


class _Expected(NamedTuple):
    bit: int
    prefix_chunks: list[bytes]


class Predictions:
    def __init__(self) -> None:
        self._pods: dict[bytes, int] = {}
        self._decisions: dict[int, _Expected] = {}
        self._expiring: deque[tuple[float, int]] = deque()

    def __len__(self) -> int:
        return len(self._pods)

    @property
    def pods(self) -> Mapping[bytes, int]:
        """Prefix chunk -> bits of the pods that will have it."""
        return self._pods

    def expect(self, decision: int, bit: int, prefix_chunks: Iterable[bytes]) -> None:
        """Those of `prefix_chunks` that are not expected there yet are tagged with `decision`."""
        pods = self._pods
        new = [chunk for chunk in prefix_chunks if not pods.get(chunk, 0) & bit]
        if not new:
            return
        for chunk in new:
            pods[chunk] = pods.get(chunk, 0) | bit
        self._decisions[decision] = _Expected(bit, new)

    def reported(self, bit: int, prefix_chunks: Iterable[bytes]) -> None:
        """The pod itself has reported these, added or removed: its report counts."""
        if self._pods:
            clear(self._pods, bit, prefix_chunks)

    def computed(self, decision: int, now: float) -> None:
        """The request's prompt is computed: what the pod does not report soon, it does not have."""
        if decision in self._decisions:
            self._expiring.append((now + EXPIRY_S, decision))

    def drop(self, decision: int) -> None:
        expected = self._decisions.pop(decision, None)
        if expected is not None:
            clear(self._pods, *expected)

    def forget(self, bit: int) -> None:
        """The pod is gone, or sends a new snapshot; another one may get its bit."""
        for decision in [each for each, expected in self._decisions.items() if expected.bit == bit]:
            self.drop(decision)

    def expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            self.drop(self._expiring.popleft()[1])
