"""What the operator measures, in the names of `metric_specs`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client import ProcessCollector

from pagemill_operator.controller import metric_specs as specs
from pagemill_operator.status.observation import Observation
from pagemill_protocol.metrics import Metrics, MetricSpec

CONTROLLER = "llmdeployment"


class OperatorMetrics:
    """One registry per operator, so that tests do not share counts. Implements `queue.QueueObserver`."""

    def __init__(self) -> None:
        self._metrics = Metrics(specs.OPERATOR_METRICS, controller=CONTROLLER, name=CONTROLLER)
        self._deployments: dict[str, dict[str, str]] = {}
        """Key -> labels of its series."""
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
        """Values that are read at each scrape."""
        self._metrics.gauge(specs.DEPTH).set_function(depth)
        self._metrics.gauge(specs.DEPLOYMENTS).set_function(deployments)
        for kind in kinds:
            self._metrics.gauge(specs.WATCH_AGE_SECONDS, resource=kind).set_function(partial(watch_age_s, kind))

    def reconciled(self, result: str, seconds: float) -> None:
        """`result`: success, requeue or error."""
        self._metrics.counter(specs.RECONCILES, result=result).inc()
        self._metrics.histogram(specs.RECONCILE_SECONDS).observe(seconds)
        if result == "error":
            self._metrics.counter(specs.RECONCILE_ERRORS).inc()

    def responded(self, code: str, method: str) -> None:
        self._metrics.counter(specs.REQUESTS, code=code, method=method).inc()

    def wrote(self, kind: str, verb: str) -> None:
        self._metrics.counter(specs.WRITES, kind=kind, verb=verb).inc()

    def scaled(self, key: str, replicas: int) -> None:
        """The autoscaler has decided for so many, or advises them."""
        namespace, _, deployment = key.partition("/")
        self._metrics.gauge(specs.AUTOSCALER_REPLICAS, namespace=namespace, deployment=deployment).set(replicas)

    def not_scaled(self, key: str) -> None:
        """It is not scaled any more."""
        namespace, _, deployment = key.partition("/")
        self._metrics.forget(specs.AUTOSCALER_REPLICAS, namespace=namespace, deployment=deployment)

    def observed(self, observation: Observation) -> None:
        """Replicas, GPUs and price of one deployment; those of a spec that cannot be read stay as they were."""
        plan = observation.plan
        if plan is None:
            return
        labels = {"namespace": plan.namespace, "deployment": plan.name, "model": plan.model_name}
        if self._deployments.get(plan.key) != labels or plan.gpu_hour_price is None:
            self.forget_deployment(plan.key)
        self._deployments[plan.key] = labels
        num_live = sum(replica.live for replica in observation.replicas)
        values: dict[MetricSpec, float | None] = {
            specs.DEPLOYMENT_DESIRED: plan.replicas,
            specs.DEPLOYMENT_READY: len(observation.ready()),
            specs.DEPLOYMENT_UPDATED: len(observation.ready_current()),
            specs.DEPLOYMENT_MAX: plan.max_replicas,
            specs.DEPLOYMENT_GPUS: num_live * plan.gpus_per_replica,
            specs.DEPLOYMENT_GPU_HOUR_PRICE: plan.gpu_hour_price,
        }
        for spec, value in values.items():
            if value is not None:
                self._metrics.gauge(spec, **labels).set(value)

    def forget_deployment(self, key: str) -> None:
        """It is gone, or serves another model."""
        labels = self._deployments.pop(key, None)
        if labels is not None:
            for spec in specs.DEPLOYMENT_METRICS:
                self._metrics.forget(spec, **labels)

    def leads(self, leads: bool) -> None:
        self._metrics.gauge(specs.LEADS).set(int(leads))

    def became_ready(self, seconds: float) -> None:
        self._metrics.histogram(specs.READY_SECONDS).observe(seconds)

    def started(self, seconds: Mapping[str, float]) -> None:
        """A pod has become ready; by phase."""
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

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return self._metrics.render()
