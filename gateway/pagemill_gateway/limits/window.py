"""Use within the last minute, counted in buckets of a second. Plain arithmetic; `redis/reserve.lua` says the same.

A bucket counts until the minute after its end is over, which is up to a second longer than needed: no minute holds more
than its limit, wherever it begins.
"""

from __future__ import annotations

from pagemill_gateway.limits.store import BUCKET_MS, WINDOW_BUCKETS, Level


class Window:
    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        """Amount by number of the bucket, oldest first."""
        self.used = 0

    def forget_old(self, now_ms: int) -> None:
        oldest = now_ms // BUCKET_MS - WINDOW_BUCKETS + 1
        while self._buckets and (first := next(iter(self._buckets))) < oldest:
            self.used -= self._buckets.pop(first)

    def wait_ms(self, amount: int, limit: int, now_ms: int) -> int:
        """Until `amount` fits below `limit`; 0: it fits now. `amount` is at most `limit`."""
        excess = self.used + amount - limit
        if excess <= 0:
            return 0
        for bucket, used in self._buckets.items():
            excess -= used
            if excess <= 0:
                return _gone_ms(bucket) - now_ms
        raise AssertionError("more was asked than the limit")

    def add(self, amount: int, now_ms: int) -> int:
        """Returns the bucket it went to."""
        bucket = now_ms // BUCKET_MS
        self._buckets[bucket] = self._buckets.get(bucket, 0) + amount
        self.used += amount
        return bucket

    def correct(self, bucket: int, difference: int, now_ms: int) -> None:
        """What was added to `bucket` turned out to be different: less counts there, more counts now."""
        self.forget_old(now_ms)
        if difference > 0:
            self.add(difference, now_ms)
        elif bucket in self._buckets:
            self._buckets[bucket] += difference
            self.used += difference

    def level(self, limit: int, now_ms: int) -> Level:
        last = next((bucket for bucket in reversed(self._buckets) if self._buckets[bucket]), None)
        reset_ms = 0 if last is None else _gone_ms(last) - now_ms
        return Level(limit, max(0, limit - self.used), reset_ms / 1000)


def _gone_ms(bucket: int) -> int:
    return (bucket + WINDOW_BUCKETS) * BUCKET_MS
