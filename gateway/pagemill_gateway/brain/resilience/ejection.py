"""The circuit breaker of one endpoint: a failure ejects it for a short while, then one request at a time probes it.

Pure: time comes in as seconds of a monotonic clock, requests as the numbers of their decisions. It never considers
other endpoints; `brain.resilience.recovery` does, and bounds how many of a deployment are out.
"""

from __future__ import annotations


class Ejection:
    def __init__(self, base_s: float, max_s: float) -> None:
        self._base_s = base_s
        self._max_s = max_s
        self._num_failures = 0
        self._ejected = False
        self._until = 0.0
        self._since = 0
        """Number of the newest decision at the latest ejection."""
        self._probe: int | None = None

    @property
    def num_failures(self) -> int:
        """Failures since it last served a request to its end."""
        return self._num_failures

    @property
    def ejected(self) -> bool:
        """Nothing has shown since the latest failure that it works again."""
        return self._ejected

    def allows(self, now: float) -> bool:
        """Whether a request may go there: it is healthy, or due for a probe and has none."""
        if not self._ejected:
            return True
        return now >= self._until and self._probe is None

    def covers(self, decision: int) -> bool:
        """Whether `decision` was made before the latest ejection: its failure belongs to the same incident."""
        return decision <= self._since

    def chosen(self, decision: int, now: float) -> None:
        """`decision` goes there; it is the probe when the endpoint was ejected and is due."""
        if self._ejected and now >= self._until and self._probe is None:
            self._probe = decision

    def released(self, decision: int) -> None:
        """`decision` ended without saying anything of the endpoint."""
        if self._probe == decision:
            self._probe = None

    def answered(self, decision: int) -> None:
        """`decision` got its first frame. Decisions from before the ejection prove nothing."""
        if self._ejected and not self.covers(decision):
            self._ejected = False
            self._probe = None

    def succeeded(self, decision: int) -> None:
        """`decision` was served to its end, or in a way that shows that the endpoint works: the next pause is short."""
        if not self.covers(decision):
            self._ejected = False
            self._probe = None
            self._num_failures = 0

    def failed(self, now: float, newest_decision: int, *, factor: float = 1.0) -> None:
        """Eject, for `factor` times as long as after a plain failure.

        Failures of requests that were already there when it was ejected do not lengthen the pause.
        """
        self._probe = None
        if self._ejected and now < self._until:
            return
        self._until = now + factor * min(self._max_s, self._base_s * 2.0**self._num_failures)
        self._num_failures += 1
        self._ejected = True
        self._since = newest_decision

    def probe_now(self) -> None:
        """Another sign shows that the endpoint is back: the next request may probe it."""
        self._until = 0.0
