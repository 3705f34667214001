"""Predicts the prefix chunks that pods will have, from the requests that were dispatched to them.

A prediction belongs to the decision that causes it. It ends when the request fails, when the pod reports the prefix
chunk, or at the latest `EXPIRY_S` after the first token. `brain.placement.prefix_index` has only reported prefix
chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pagemill_routing.brain.endpoints.dispatches import EXPIRY_S
from pagemill_routing.brain.placement.prefix_index import clear


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
        """The bits of the pods that will have each prefix chunk."""
        return self._pods

    def expect(self, decision: int, bit: int, prefix_chunks: Iterable[bytes]) -> None:
        """Add predictions for the prefix chunks that are not expected at the pod yet; they belong to `decision`."""
        pods = self._pods
        new = [chunk for chunk in prefix_chunks if not pods.get(chunk, 0) & bit]
        if not new:
            return
        for chunk in new:
            pods[chunk] = pods.get(chunk, 0) | bit
        self._decisions[decision] = _Expected(bit, new)

    def reported(self, bit: int, prefix_chunks: Iterable[bytes]) -> None:
        """End the predictions of prefix chunks that the pod reported as added or removed."""
        if self._pods:
            clear(self._pods, bit, prefix_chunks)

    def computed(self, decision: int, now: float) -> None:
        """Let the decision's predictions expire, because the prompt is computed and the pod will report it soon."""
        if decision in self._decisions:
            self._expiring.append((now + EXPIRY_S, decision))

    def drop(self, decision: int) -> None:
        expected = self._decisions.pop(decision, None)
        if expected is not None:
            clear(self._pods, *expected)

    def forget(self, bit: int) -> None:
        """End all predictions for a pod that is gone or sends a new snapshot; its bit may be reused."""
        for decision in [each for each, expected in self._decisions.items() if expected.bit == bit]:
            self.drop(decision)

    def expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            self.drop(self._expiring.popleft()[1])
