"""The work queue of owner keys: it coalesces, spaces and backs off.

One worker at a time works on a key; if the key is added meanwhile, it runs once more afterwards. Two runs of a key
start at least `min_interval_s` apart, so that a burst of events costs one run. Failures back off per key.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol

Clock = Callable[[], float]


class QueueObserver(Protocol):
    """Callbacks for metrics."""

    def added(self) -> None: ...
    def retried(self) -> None: ...
    def taken(self, waited_s: float) -> None: ...
    def finished(self, worked_s: float) -> None: ...


class WorkQueue:
    def __init__(
        self,
        *,
        min_interval_s: float = 0.25,
        backoff_first_s: float = 0.25,
        backoff_longest_s: float = 30.0,
        observer: QueueObserver | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._min_interval_s = min_interval_s
        self._backoff_first_s = backoff_first_s
        self._backoff_longest_s = backoff_longest_s
        self._observer = observer
        self._clock = clock
        self._due: dict[str, float] = {}
        """Key -> time at which it may run."""
        self._added_at: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        """(due, order, key); an entry that differs from `_due` is outdated."""
        self._order = itertools.count()
        self._running: dict[str, float] = {}
        self._last_start: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of keys that are due; keys due later, such as resyncs, do not count."""
        now = self._clock()
        return sum(due <= now for due in self._due.values())

    def add(self, key: str, delay_s: float = 0.0) -> None:
        """Run `key` in `delay_s` seconds, or earlier if that is already planned."""
        now = self._clock()
        due = max(now + delay_s, self._last_start.get(key, -1e9) + self._min_interval_s)
        if self._due.get(key, float("inf")) <= due:
            return
        if key not in self._due and self._observer:
            self._observer.added()
        self._due[key] = due
        self._added_at[key] = now
        heapq.heappush(self._heap, (due, next(self._order), key))
        self._changed.set()

    def add_failed(self, key: str, longest_s: float | None = None) -> float:
        """Run the key again after a pause that doubles with each failure in a row; return the pause in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        longest_s = self._backoff_longest_s if longest_s is None else longest_s
        pause_s = min(longest_s, self._backoff_first_s * 2.0 ** min(failures - 1, 30))
        if self._observer:
            self._observer.retried()
        self.add(key, pause_s)
        return pause_s

    def succeeded(self, key: str) -> None:
        self._failures.pop(key, None)

    def forget(self, key: str) -> None:
        """Forget everything about a key whose owner is gone."""
        for each in (self._due, self._added_at, self._last_start, self._failures):
            each.pop(key, None)

    async def take(self) -> str:
        """Return the next key that is due; the caller must call `finish` with it."""
        while True:
            if (key := self._pop_due()) is not None:
                return key
            self._changed.clear()
            timeout_s = self._until_next()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def finish(self, key: str) -> None:
        started = self._running.pop(key)
        if self._observer:
            self._observer.finished(self._clock() - started)
        # The key may have been added again and be due: another worker must check.
        self._changed.set()

    def longest_running_s(self) -> float:
        """Return the age of the oldest run in seconds; 0 if nothing runs."""
        now = self._clock()
        return max((now - started for started in self._running.values()), default=0.0)

    def _pop_due(self) -> str | None:
        now = self._clock()
        held: list[tuple[float, int, str]] = []
        found: str | None = None
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            due, _, key = entry
            if self._due.get(key) != due:
                continue
            if key in self._running:
                held.append(entry)
                continue
            found = key
            break
        for entry in held:
            heapq.heappush(self._heap, entry)
        if found is None:
            return None
        del self._due[found]
        if self._observer:
            self._observer.taken(max(0.0, now - max(self._added_at[found], due)))
        self._running[found] = self._last_start[found] = now
        return found

    def _until_next(self) -> float | None:
        """Return the seconds until a key can be due, or None if only running keys wait."""
        now = self._clock()
        waiting = [due for due, _, key in self._heap if key not in self._running and self._due.get(key) == due]
        return max(0.0, min(waiting) - now) if waiting else None
