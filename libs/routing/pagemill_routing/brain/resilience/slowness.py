"""Detects endpoints that decode far slower than their siblings.

An endpoint is compared by the median time per token of its latest requests. It is slow if that is several times the
median of its siblings. Pure; `brain.resilience.recovery` limits how many are ejected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

import msgspec

MAX_AGE_S = 60.0
NUM_SAMPLES = 16
LEAST_SAMPLES = 8
"""The number of samples that an endpoint needs to be compared."""
SLOW_FACTOR = 4.0
LEAST_EXCESS_MS = 20.0
"""The smallest difference per token that counts as slow."""


class _Sample(msgspec.Struct, frozen=True, gc=False):
    ms_per_token: float
    at: float


class Slowness:
    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {}
        self._typical: dict[str, _Sample] = {}
        """The medians of endpoints with enough samples, with the time of the latest sample."""

    def note(self, endpoint_id: str, ms_per_token: float, now: float) -> None:
        samples = self._samples.setdefault(endpoint_id, deque(maxlen=NUM_SAMPLES))
        samples.append(_Sample(ms_per_token, now))
        while now - samples[0].at > MAX_AGE_S:
            samples.popleft()
        if len(samples) >= LEAST_SAMPLES:
            self._typical[endpoint_id] = _Sample(median(each.ms_per_token for each in samples), now)
        else:
            self._typical.pop(endpoint_id, None)

    def forget(self, endpoint_id: str) -> None:
        """Drop an endpoint's samples."""
        self._samples.pop(endpoint_id, None)
        self._typical.pop(endpoint_id, None)

    def keep_only(self, endpoint_ids: Iterable[str]) -> None:
        for gone in self._samples.keys() - set(endpoint_ids):
            self.forget(gone)

    def is_slow(self, endpoint_id: str, siblings: Iterable[str], now: float) -> bool:
        """Whether the endpoint is slow. `siblings` are iterated only if its time per token is long enough to matter."""
        mine = self._typical_ms(endpoint_id, now)
        if mine is None or mine <= LEAST_EXCESS_MS:
            return False
        others = [ms for each in siblings if each != endpoint_id and (ms := self._typical_ms(each, now)) is not None]
        if not others:
            return False
        usual = median(others)
        return mine > SLOW_FACTOR * usual and mine - usual > LEAST_EXCESS_MS

    def _typical_ms(self, endpoint_id: str, now: float) -> float | None:
        typical = self._typical.get(endpoint_id)
        return typical.ms_per_token if typical is not None and now - typical.at <= MAX_AGE_S else None
