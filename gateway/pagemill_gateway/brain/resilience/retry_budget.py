"""How many tries beyond the first a deployment's requests may have together, so that retries never become the load.

A share of the requests that began in the last seconds, and a few in any case. Pure: time comes in. What counts against
it is `brain.resilience.recovery`'s to say.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
FREE_RETRIES = 10
"""In a window, whatever the number of requests."""


class RetryBudget:
    def __init__(self, share: float) -> None:
        self._share = share
        self._requests = _Window()
        self._retries = _Window()

    def began(self, now: float) -> None:
        self._requests.add(now)

    def take(self, now: float) -> bool:
        """Whether one more retry is in the budget; it is spent then."""
        if self._retries.count(now) >= max(FREE_RETRIES, self._share * self._requests.count(now)):
            return False
        self._retries.add(now)
        return True


class _Window:
    """Events of the last `WINDOW_S`, counted by tenths of it: memory does not grow with the load."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, int]] = deque()
        self._total = 0

    def add(self, now: float) -> None:
        slot = _slot(now)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1] = (slot, self._slots[-1][1] + 1)
        else:
            self._slots.append((slot, 1))
        self._total += 1

    def count(self, now: float) -> int:
        oldest = _slot(now - WINDOW_S)
        while self._slots and self._slots[0][0] <= oldest:
            self._total -= self._slots.popleft()[1]
        return self._total


def _slot(now: float) -> int:
    return int(now / (WINDOW_S / 10))
