"""Decides, after failures, which endpoints are ejected and which requests may be retried.

It has the circuit breakers (`brain.resilience.ejection`), the retry budgets and the slowness of endpoints. Pure
bookkeeping. `brain.resilience.poison_requests` decides whether a request is the cause.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from pagemill_protocol.errors import unavailable
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.interface import CompletedRequest, FailureKind, RetryContext
from pagemill_routing.brain.resilience.ejection import Ejection
from pagemill_routing.brain.resilience.slowness import Slowness

SLOW_EJECTION_FACTOR = 20.0
"""A slow endpoint is ejected this many times longer than one that failed, because detecting it takes many requests."""
EJECTING_FAILURES: frozenset[FailureKind] = frozenset({"unreachable", "broken", "lost", "killed", "stalled", "crashed"})
BUDGETED_FAILURES: frozenset[FailureKind] = frozenset({"request", "broken"})
"""The failures whose retries use the budget, because they may fail again. Other retries are free: a refusal costs an
engine nothing, and the work of an engine that ended must be done elsewhere.
"""
WINDOW_S = 10.0
FREE_RETRIES = 10
"""The number of retries in a window that an account may always use if no other needs any."""
FREE_RETRIES_OF_ALL = 2 * FREE_RETRIES
"""The number of retries in a window that are always allowed to all accounts together."""


class Recovery:
    def __init__(
        self, *, ejection_base_s: float, ejection_max_s: float, max_ejected_share: float, retry_share: float
    ) -> None:
        self._ejection_base_s = ejection_base_s
        self._ejection_max_s = ejection_max_s
        self._max_ejected_share = max_ejected_share
        self._retry_share = retry_share
        self._budgets: dict[str, RetryBudget] = {}
        self._slowness = Slowness()
        self._ejections: WeakKeyDictionary[EndpointRecord, Ejection] = WeakKeyDictionary()
        """The ejections by record, because an endpoint that takes over another one's id has a record of its own."""
        self._failed: set[str] = set()
        """The endpoints that failed and may be ejected, so that decisions need not check all endpoints."""

    def keep_only(self, deployments: Iterable[str], endpoint_ids: Iterable[str]) -> None:
        """Forget all deployments and endpoints but these, after a change of the catalogue."""
        known, known_endpoints = set(deployments), set(endpoint_ids)
        self._budgets = {key: budget for key, budget in self._budgets.items() if key in known}
        self._slowness.keep_only(known_endpoints)
        self._failed &= known_endpoints

    def ejection(self, record: EndpointRecord) -> Ejection:
        ejection = self._ejections.get(record)
        if ejection is None:
            ejection = self._ejections[record] = Ejection(self._ejection_base_s, self._ejection_max_s)
        return ejection

    # Retries.

    def admit(
        self, deployment: str, account: str, retry: RetryContext | None, failed_at: EndpointRecord | None, now: float
    ) -> None:
        """Count an attempt of a request of an account. Raises `PagemillError` 503 for a retry beyond the budget."""
        budget = self._budgets.get(deployment)
        if budget is None:
            budget = self._budgets[deployment] = RetryBudget(self._retry_share)
        if retry is None:
            budget.began(now, account)
            return
        same_incident = failed_at is not None and self.ejection(failed_at).covers(retry.decision)
        if retry.kind not in BUDGETED_FAILURES or same_incident or budget.take(now, account):
            return
        raise unavailable(
            f"Too many requests of {deployment} are being tried a second time. Try again shortly.",
            retry_after_s=1,
            code="retry_budget_exhausted",
        )

    # Ejected endpoints.

    def out(self, records: Sequence[EndpointRecord], now: float) -> set[str]:
        """Return the ids of the deployment's endpoints that are ejected now.

        Of endpoints with fresh reports at most a share is ejected, but at least one: if more fail, the cause may be
        elsewhere. An ejected endpoint without fresh reports is not probed while others report. If all endpoints would
        be ejected, none is.
        """
        if not self._failed:
            return set()
        self._failed -= {record.endpoint.id for record in records if not self.ejection(record).ejected}
        if not any(self.ejection(record).ejected for record in records):
            return set()
        fresh = {record.endpoint.id for record in records if record.reports.fresh(now)}
        ejected = [
            record
            for record in records
            if not self.ejection(record).allows(now)
            or (self.ejection(record).ejected and fresh and record.endpoint.id not in fresh)
        ]
        if len(ejected) == len(records):
            return set()
        reporting = [record for record in ejected if record.endpoint.id in fresh]
        reporting.sort(key=lambda record: -self.ejection(record).num_failures)
        most = max(1, int(self._max_ejected_share * len(records)))
        return {record.endpoint.id for record in ejected} - {record.endpoint.id for record in reporting[most:]}

    def failed(self, record: EndpointRecord, decision: int, kind: FailureKind, newest: int, now: float) -> None:
        """Note a decision that failed at the endpoint."""
        if kind in EJECTING_FAILURES:
            self._eject(record, now, newest)
        elif kind in ("refused", "request"):
            self.ejection(record).succeeded(decision)

    def served(
        self,
        record: EndpointRecord,
        decision: int,
        served: CompletedRequest,
        siblings: Iterable[EndpointRecord],
        newest: int,
        now: float,
    ) -> None:
        """Note a completed decision. `siblings`, the deployment's endpoints, are iterated only if needed."""
        endpoint_id = record.endpoint.id
        self.ejection(record).succeeded(decision)
        if served.ms_per_token is None or self.ejection(record).covers(decision):
            return
        self._slowness.note(endpoint_id, served.ms_per_token, now)
        if self._slowness.is_slow(endpoint_id, (each.endpoint.id for each in siblings), now):
            self._slowness.forget(endpoint_id)
            self._eject(record, now, newest, factor=SLOW_EJECTION_FACTOR)

    def _eject(self, record: EndpointRecord, now: float, newest: int, *, factor: float = 1.0) -> None:
        self.ejection(record).failed(now, newest, factor=factor)
        self._failed.add(record.endpoint.id)


class RetryBudget:
    """Limits the retries of a deployment to a share of its recent requests, but at least `FREE_RETRIES_OF_ALL`.

    So retries never become the main load. Each account, which is a tenant or a key, has the same share of its own
    requests for itself. Beyond it, an account gets at most half of what the others have left, so that no account can
    use up the retries of all.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._requests = _EventWindow()
        self._retries = _EventWindow()

    def began(self, now: float, account: str = "") -> None:
        self._requests.add(now, account)

    def take(self, now: float, account: str = "") -> bool:
        """Take a retry from the budget. Return whether there was one."""
        total, own = self._retries.count(now), self._retries.count_of(account, now)
        left_by_others = max(FREE_RETRIES_OF_ALL, self._share * self._requests.count(now)) - (total - own)
        if own >= max(left_by_others / 2, self._share * self._requests.count_of(account, now)):
            return False
        self._retries.add(now, account)
        return True


class _EventWindow:
    """Counts the events of the last `WINDOW_S` in ten slots, so that memory does not grow with the load."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, Counter[str]]] = deque()
        """The numbers of events by account."""
        self._total = 0

    def add(self, now: float, account: str) -> None:
        slot = _slot(now)
        if not self._slots or self._slots[-1][0] != slot:
            self.count(now)  # drops what is too old
            self._slots.append((slot, Counter()))
        self._slots[-1][1][account] += 1
        self._total += 1

    def count(self, now: float) -> int:
        oldest = _slot(now - WINDOW_S)
        while self._slots and self._slots[0][0] <= oldest:
            self._total -= self._slots.popleft()[1].total()
        return self._total

    def count_of(self, account: str, now: float) -> int:
        self.count(now)
        return sum(counts[account] for _, counts in self._slots)


def _slot(now: float) -> int:
    return int(now / (WINDOW_S / 10))
