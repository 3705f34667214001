"""The breaker of one endpoint: a failure takes it out for a short while, then one request at a time probes it.

Pure: time comes in as seconds of a monotonic clock. It never forbids the last endpoint of a deployment; that rule
belongs to whoever picks among several.
"""

from __future__ import annotations


class Ejection:
    def __init__(self, base_s: float, max_s: float) -> None:
        self._base_s = base_s
        self._max_s = max_s
        self._num_failures = 0
        self._until = 0.0
        self._probe: int | None = None

    @property
    def num_failures(self) -> int:
        """Failures since the last success."""
        return self._num_failures

    def allows(self, now: float) -> bool:
        """Whether a request may go there: healthy, or due for a probe that nobody makes yet."""
        if not self._num_failures:
            return True
        return now >= self._until and self._probe is None

    def chosen(self, decision: int, now: float) -> None:
        """`decision` goes there; it is the probe when the endpoint was ejected and is due."""
        if self._num_failures and now >= self._until and self._probe is None:
            self._probe = decision

    def released(self, decision: int) -> None:
        """`decision` ended without a verdict on the endpoint."""
        if self._probe == decision:
            self._probe = None

    def succeeded(self) -> None:
        self._num_failures = 0
        self._until = 0.0
        self._probe = None

    def failed(self, now: float) -> None:
        """Eject. Failures of requests that were already there when it was ejected do not lengthen the pause."""
        self._probe = None
        if self._num_failures and now < self._until:
            return
        self._until = now + min(self._max_s, self._base_s * 2.0**self._num_failures)
        self._num_failures += 1

    def probe_now(self) -> None:
        """Other evidence says that the endpoint is back: the next request may probe it."""
        self._until = 0.0
