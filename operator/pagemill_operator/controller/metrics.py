"""The operator's metrics, under the names that dashboards of operators know, plus a few of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

CONTROLLER = "llmdeployment"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_READY_SECONDS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class Metrics:
    """One registry per operator, so that tests do not share counts. Implements `queue.QueueObserver`."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._reconciles = Counter(
            "controller_runtime_reconcile", "Finished reconciles by result", ["controller", "result"], registry=registry
        )
        self._reconcile_errors = Counter(
            "controller_runtime_reconcile_errors", "Failed reconciles", ["controller"], registry=registry
        )
        self._reconcile_time = Histogram(
            "controller_runtime_reconcile_time_seconds",
            "Duration of reconciles",
            ["controller"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._adds = Counter("workqueue_adds", "Keys put into the queue", ["name"], registry=registry)
        self._retries = Counter("workqueue_retries", "Keys put back after a failure", ["name"], registry=registry)
        self._waits = Histogram(
            "workqueue_queue_duration_seconds",
            "How long due keys waited for a worker",
            ["name"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._works = Histogram(
            "workqueue_work_duration_seconds",
            "How long workers held keys",
            ["name"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._requests = Counter(
            "rest_client_requests", "Requests to the API server", ["code", "method"], registry=registry
        )
        self._leads = Gauge(
            "leader_election_master_status", "1 for the operator that leads", ["name"], registry=registry
        )
        self._ready_time = Histogram(
            "pagemill_operator_ready_duration_seconds",
            "From the creation of a deployment, or its latest change, to Ready",
            buckets=_READY_SECONDS,
            registry=registry,
        )
        self._writes = Counter(
            "pagemill_operator_writes", "Objects written, by kind and verb", ["kind", "verb"], registry=registry
        )
        self.loop_lag = Gauge(
            "pagemill_operator_loop_lag_seconds", "How late the event loop's latest turn was", registry=registry
        )
        self._leads.labels(CONTROLLER).set(0)
        # Series exist before the first event, so that rates and alerts see the first one.
        for result in ("success", "error", "requeue"):
            self._reconciles.labels(CONTROLLER, result)
        self._reconcile_errors.labels(CONTROLLER)

    def watch(
        self,
        *,
        depth: Callable[[], float],
        objects: Callable[[], float],
        watch_age_s: Callable[[str], float],
        kinds: Iterable[str],
    ) -> None:
        """Values that are asked for when somebody scrapes."""
        gauge = Gauge("workqueue_depth", "Keys that are due", ["name"], registry=self.registry)
        gauge.labels(CONTROLLER).set_function(depth)
        Gauge("pagemill_operator_deployments", "Deployments served", registry=self.registry).set_function(objects)
        ages = Gauge(
            "pagemill_operator_watch_age_seconds",
            "Since a watch last said something, bookmarks included",
            ["resource"],
            registry=self.registry,
        )
        for kind in kinds:
            ages.labels(kind).set_function(partial(watch_age_s, kind))

    def reconciled(self, result: str, seconds: float) -> None:
        """`result`: success, requeue or error."""
        self._reconciles.labels(CONTROLLER, result).inc()
        self._reconcile_time.labels(CONTROLLER).observe(seconds)
        if result == "error":
            self._reconcile_errors.labels(CONTROLLER).inc()

    def responded(self, code: str, method: str) -> None:
        self._requests.labels(code, method).inc()

    def wrote(self, kind: str, verb: str) -> None:
        self._writes.labels(kind, verb).inc()

    def leads(self, leads: bool) -> None:
        self._leads.labels(CONTROLLER).set(int(leads))

    def became_ready(self, seconds: float) -> None:
        self._ready_time.observe(seconds)

    def added(self) -> None:
        self._adds.labels(CONTROLLER).inc()

    def retried(self) -> None:
        self._retries.labels(CONTROLLER).inc()

    def taken(self, waited_s: float) -> None:
        self._waits.labels(CONTROLLER).observe(waited_s)

    def finished(self, worked_s: float) -> None:
        self._works.labels(CONTROLLER).observe(worked_s)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
