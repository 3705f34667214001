"""The operator's metrics, under the names of `metric_specs`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client import ProcessCollector

from pagemill_operator.backends.deployment_metrics import DeploymentMetrics
from pagemill_operator.controller.reporting import metric_specs as specs
from pagemill_protocol.metrics import Metrics

CONTROLLER = "llmdeployment"


class OperatorMetrics(DeploymentMetrics):
    """One registry per operator, so that tests do not share counts. Implements `queue.QueueObserver`."""

    def __init__(self) -> None:
        super().__init__(Metrics(specs.OPERATOR_METRICS, controller=CONTROLLER, name=CONTROLLER))
        ProcessCollector(registry=self._metrics.registry)
        # Series exist before the first event, so that rates and alerts see the first one.
        for result in ("success", "error", "requeue"):
            self._metrics.counter(specs.RECONCILES, result=result)
        for spec in (specs.RECONCILE_ERRORS, specs.ADDS, specs.RETRIES):
            self._metrics.counter(spec)
        self.leads(False)

    def watch(
        self,
        *,
        depth: Callable[[], float],
        deployments: Callable[[], float],
        watch_age_s: Callable[[str], float],
        kinds: Iterable[str],
    ) -> None:
        """Set the functions whose values are read at each scrape."""
        self._metrics.gauge(specs.DEPTH).set_function(depth)
        self._metrics.gauge(specs.DEPLOYMENTS).set_function(deployments)
        for kind in kinds:
            self._metrics.gauge(specs.WATCH_AGE_SECONDS, resource=kind).set_function(partial(watch_age_s, kind))

    def reconciled(self, result: str, seconds: float) -> None:
        """Count a reconcile; `result` is success, requeue or error."""
        self._metrics.counter(specs.RECONCILES, result=result).inc()
        self._metrics.histogram(specs.RECONCILE_SECONDS).observe(seconds)
        if result == "error":
            self._metrics.counter(specs.RECONCILE_ERRORS).inc()

    def responded(self, code: str, method: str) -> None:
        self._metrics.counter(specs.REQUESTS, code=code, method=method).inc()

    def wrote(self, kind: str, verb: str) -> None:
        self._metrics.counter(specs.WRITES, kind=kind, verb=verb).inc()

    def leads(self, leads: bool) -> None:
        self._metrics.gauge(specs.LEADS).set(int(leads))

    def became_ready(self, seconds: float) -> None:
        self._metrics.histogram(specs.READY_SECONDS).observe(seconds)

    def started(self, seconds: Mapping[str, float]) -> None:
        """Record the start of a pod that has become ready, in seconds by phase."""
        for phase, value in seconds.items():
            self._metrics.histogram(specs.COLD_START_SECONDS, phase=phase).observe(value)

    def lagged(self, seconds: float) -> None:
        self._metrics.gauge(specs.LOOP_LAG_SECONDS).set(seconds)

    def added(self) -> None:
        self._metrics.counter(specs.ADDS).inc()

    def retried(self) -> None:
        self._metrics.counter(specs.RETRIES).inc()

    def taken(self, waited_s: float) -> None:
        self._metrics.histogram(specs.QUEUE_SECONDS).observe(waited_s)

    def finished(self, worked_s: float) -> None:
        self._metrics.histogram(specs.WORK_SECONDS).observe(worked_s)
