"""What is measured of each LLMDeployment: replicas, GPUs, their price and the autoscaler's decision.

Values come from observations and decisions; nothing is decided here. The label `variant` is the deployment's
`namespace/name`, as gateways export it: a label `namespace` of its own would clash with the one that Prometheus gives
to the operator's pod. Neighbours: `controller.metrics` has these beside the operator's own, `pagemill up` alone.
"""

from __future__ import annotations

from pagemill_operator.status.observation import Observation
from pagemill_protocol.metrics import Metrics, MetricSpec, Scrape

_LABELS = ("model", "variant")
AUTOSCALER_REPLICAS = MetricSpec(
    "pagemill_autoscaler_replicas", "gauge", "Replicas that the autoscaler has decided for, or advises.", ("variant",)
)
DESIRED = MetricSpec("pagemill_deployment_desired_replicas", "gauge", "Replicas that the operator keeps now.", _LABELS)
READY = MetricSpec("pagemill_deployment_ready_replicas", "gauge", "Replicas that accept requests.", _LABELS)
UPDATED = MetricSpec(
    "pagemill_deployment_updated_replicas", "gauge", "Ready replicas that run the present spec.", _LABELS
)
MAX = MetricSpec(
    "pagemill_deployment_max_replicas",
    "gauge",
    "Replicas that the autoscaler may reach; without one in mode Active, those of the spec.",
    _LABELS,
)
GPUS = MetricSpec("pagemill_deployment_gpus", "gauge", "GPUs of all pods that exist, ready or not.", _LABELS)
GPU_HOUR_PRICE = MetricSpec(
    "pagemill_deployment_gpu_hour_price",
    "gauge",
    "Price of one GPU for one hour, as `spec.cost.gpuHour` says; absent without it.",
    _LABELS,
)
_OBSERVED = [DESIRED, READY, UPDATED, MAX, GPUS, GPU_HOUR_PRICE]
DEPLOYMENT_METRICS = [AUTOSCALER_REPLICAS, *_OBSERVED]


class DeploymentMetrics:
    def __init__(self, metrics: Metrics) -> None:
        """`metrics`: made from `DEPLOYMENT_METRICS`, or from more."""
        self._metrics = metrics
        self._deployments: dict[str, str] = {}
        """Key -> model of its series."""

    def observed(self, observation: Observation) -> None:
        """Replicas, GPUs and price of one deployment; those of a spec that cannot be read stay as they were."""
        plan = observation.plan
        if plan is None:
            return
        if self._deployments.get(plan.key) != plan.model_name or plan.gpu_hour_price is None:
            self.forget_deployment(plan.key)
        self._deployments[plan.key] = plan.model_name
        num_live = sum(replica.live for replica in observation.replicas)
        values: dict[MetricSpec, float | None] = {
            DESIRED: plan.replicas,
            READY: len(observation.ready()),
            UPDATED: len(observation.ready_current()),
            MAX: plan.max_replicas,
            GPUS: num_live * plan.gpus_per_replica,
            GPU_HOUR_PRICE: plan.gpu_hour_price,
        }
        for spec, value in values.items():
            if value is not None:
                self._metrics.gauge(spec, model=plan.model_name, variant=plan.key).set(value)

    def forget_deployment(self, key: str) -> None:
        """It is gone, or serves another model."""
        model = self._deployments.pop(key, None)
        if model is not None:
            for spec in _OBSERVED:
                self._metrics.forget(spec, model=model, variant=key)

    def scaled(self, key: str, replicas: int) -> None:
        """The autoscaler has decided for so many, or advises them."""
        self._metrics.gauge(AUTOSCALER_REPLICAS, variant=key).set(replicas)

    def not_scaled(self, key: str) -> None:
        """It is not scaled any more."""
        self._metrics.forget(AUTOSCALER_REPLICAS, variant=key)

    def scrape(self, accept: str = "") -> Scrape:
        """In the format that the scraper's `Accept` asks for."""
        return self._metrics.scrape(accept)
