"""The circuit breaker of one endpoint: a failure ejects it for a while, then one request at a time probes it.

Pure: the caller passes the time of a monotonic clock and the numbers of decisions. `brain.resilience.recovery` limits
how many endpoints of a deployment are ejected.
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
        """The newest decision at the latest ejection."""
        self._probe: int | None = None

    @property
    def num_failures(self) -> int:
        """The failures since the endpoint last completed a request."""
        return self._num_failures

    @property
    def ejected(self) -> bool:
        """Whether no sign since the latest failure has shown that the endpoint works."""
        return self._ejected

    def allows(self, now: float) -> bool:
        """Whether a request may be sent: the endpoint is healthy, or due for a probe that is not running yet."""
        if not self._ejected:
            return True
        return now >= self._until and self._probe is None

    def covers(self, decision: int) -> bool:
        """Whether the decision is older than the latest ejection, so that its failure is part of the same incident."""
        return decision <= self._since

    def chosen(self, decision: int, now: float) -> None:
        """Note a decision for this endpoint; it becomes the probe if one is due."""
        if self._ejected and now >= self._until and self._probe is None:
            self._probe = decision

    def released(self, decision: int) -> None:
        """Note the end of a decision that shows nothing about the endpoint."""
        if self._probe == decision:
            self._probe = None

    def answered(self, decision: int) -> None:
        """Note the first frame of a decision. Decisions from before the ejection show nothing."""
        if self._ejected and not self.covers(decision):
            self._ejected = False
            self._probe = None

    def succeeded(self, decision: int) -> None:
        """Note a decision that shows that the endpoint works; the next ejection is short again."""
        if not self.covers(decision):
            self._ejected = False
            self._probe = None
            self._num_failures = 0

    def failed(self, now: float, newest_decision: int, *, factor: float = 1.0) -> None:
        """Eject the endpoint, for `factor` times the usual time.

        Failures of requests during an ejection do not lengthen it.
        """
        self._probe = None
        if self._ejected and now < self._until:
            return
        self._until = now + factor * min(self._max_s, self._base_s * 2.0**self._num_failures)
        self._num_failures += 1
        self._ejected = True
        self._since = newest_decision

    def probe_now(self) -> None:
        """Let the next request probe the endpoint, because another sign shows that it is back."""
        self._until = 0.0
