"""What is measured of each LLMDeployment: replicas, GPUs, their price and the autoscaler's decision.

Values come from observations and decisions; nothing is decided here. The label `variant` is the deployment's
`namespace/name`, as gateways export it: a label `namespace` of its own would clash with the one that Prometheus gives
to the operator's pod. Neighbours: `controller.metrics` has these beside the operator's own, `pagemill up` alone.
"""

from __future__ import annotations

from typing import NamedTuple

from pagemill_operator.plan.types import Plan
from pagemill_operator.status.observation import Observation
from pagemill_protocol.metrics import Metrics, MetricSpec, Scrape, first_token_bound

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
FIRST_TOKEN_BUDGET = MetricSpec(
    "pagemill_deployment_first_token_budget_ratio",
    "gauge",
    "Share of the requests whose first token may come after more than `le` seconds, as `spec.autoscaling.slo` says; "
    "`le` is a bound of `pagemill_gateway_time_to_first_token_seconds`. Absent without `slo.ttft`.",
    (*_LABELS, "le"),
)
_OBSERVED = [DESIRED, READY, UPDATED, MAX, GPUS, GPU_HOUR_PRICE]
DEPLOYMENT_METRICS = [AUTOSCALER_REPLICAS, *_OBSERVED, FIRST_TOKEN_BUDGET]


class _Objective(NamedTuple):
    bound: str
    budget: float


class _Labels(NamedTuple):
    """What names the series of one deployment, beside its key."""

    model: str
    has_price: bool
    first_token_bound: str | None


class DeploymentMetrics:
    def __init__(self, metrics: Metrics) -> None:
        """`metrics`: made from `DEPLOYMENT_METRICS`, or from more."""
        self._metrics = metrics
        self._deployments: dict[str, _Labels] = {}
        """By key."""

    def observed(self, observation: Observation) -> None:
        """Replicas, GPUs and price of one deployment; those of a spec that cannot be read stay as they were."""
        plan = observation.plan
        if plan is None:
            return
        objective = _first_token_objective(plan)
        labels = _Labels(plan.model_name, plan.gpu_hour_price is not None, objective and objective.bound)
        if self._deployments.get(plan.key) != labels:
            self.forget_deployment(plan.key)
        self._deployments[plan.key] = labels
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
        if objective is not None:
            budget = self._metrics.gauge(
                FIRST_TOKEN_BUDGET, model=plan.model_name, variant=plan.key, le=objective.bound
            )
            budget.set(objective.budget)

    def forget_deployment(self, key: str) -> None:
        """It is gone, or its series have other labels now."""
        labels = self._deployments.pop(key, None)
        if labels is None:
            return
        for spec in _OBSERVED:
            self._metrics.forget(spec, model=labels.model, variant=key)
        if labels.first_token_bound is not None:
            self._metrics.forget(FIRST_TOKEN_BUDGET, model=labels.model, variant=key, le=labels.first_token_bound)

    def scaled(self, key: str, replicas: int) -> None:
        """The autoscaler has decided for so many, or advises them."""
        self._metrics.gauge(AUTOSCALER_REPLICAS, variant=key).set(replicas)

    def not_scaled(self, key: str) -> None:
        """It is not scaled any more."""
        self._metrics.forget(AUTOSCALER_REPLICAS, variant=key)

    def scrape(self, accept: str = "") -> Scrape:
        """In the format that the scraper's `Accept` asks for."""
        return self._metrics.scrape(accept)


def _first_token_objective(plan: Plan) -> _Objective | None:
    slo = None if plan.autoscaling is None else plan.autoscaling.slo
    if slo is None or slo.ttft_ms is None:
        return None
    return _Objective(first_token_bound(slo.ttft_ms / 1000), round(1 - slo.share, 4))
