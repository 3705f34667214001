"""The metrics of each LLMDeployment: replicas, GPUs, their price and the autoscaler's decision.

Values come from observations and decisions; nothing is decided here. The label `variant` is the deployment's
`namespace/name`, as gateways export it: a label `namespace` would clash with the one that Prometheus gives to the
operator's pod. `controller.reporting.metrics` exports these metrics beside the operator's own; `pagemill up` exports
these alone.
"""

from __future__ import annotations

from typing import NamedTuple

from pagemill_crds.sections.autoscaling import DEFAULT_OBJECTIVE
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.plan.types import Plan
from pagemill_operator.status.observation import INSUFFICIENT_GPU, Observation
from pagemill_protocol.metrics import Metrics, MetricSpec, Scrape, first_token_bound

_LABELS = ("model", "variant")
AUTOSCALER_REPLICAS = MetricSpec(
    "pagemill_autoscaler_replicas", "gauge", "Replicas that the autoscaler has decided on, or recommends.", ("variant",)
)
DESIRED = MetricSpec("pagemill_deployment_desired_replicas", "gauge", "Replicas that the operator keeps now.", _LABELS)
READY = MetricSpec("pagemill_deployment_ready_replicas", "gauge", "Replicas that accept requests.", _LABELS)
UPDATED = MetricSpec(
    "pagemill_deployment_updated_replicas", "gauge", "Ready replicas that run the current spec.", _LABELS
)
MAX = MetricSpec(
    "pagemill_deployment_max_replicas",
    "gauge",
    "Most replicas that the autoscaler may set; `spec.replicas` unless `spec.autoscaling.mode` is Active.",
    _LABELS,
)
WITHOUT_GPUS = MetricSpec(
    "pagemill_deployment_replicas_without_gpus", "gauge", "Replicas that wait because no node has free GPUs.", _LABELS
)
GPUS = MetricSpec("pagemill_deployment_gpus", "gauge", "GPUs of all pods that exist, ready or not.", _LABELS)
HOUR_PRICE = MetricSpec(
    "pagemill_deployment_hour_price",
    "gauge",
    "Price of all pods that exist for one hour, from `spec.cost`; absent without it.",
    _LABELS,
)
ERROR_BUDGET = MetricSpec(
    "pagemill_deployment_error_budget_ratio",
    "gauge",
    f"Share of the requests that may fail, from `spec.autoscaling.slo.objective` (default {DEFAULT_OBJECTIVE} %).",
    _LABELS,
)
FIRST_TOKEN_BUDGET = MetricSpec(
    "pagemill_deployment_first_token_budget_ratio",
    "gauge",
    "Share of the requests whose first token may take more than `le` seconds, from `spec.autoscaling.slo` (default 5 % "
    "and 2.5 s); `le` is a bound of `pagemill_gateway_time_to_first_token_seconds`.",
    (*_LABELS, "le"),
)
DEFAULT_FIRST_TOKEN = Slo(ttft_ms=2500)
_OBSERVED = [DESIRED, READY, UPDATED, MAX, WITHOUT_GPUS, GPUS, HOUR_PRICE, ERROR_BUDGET]
DEPLOYMENT_METRICS = [AUTOSCALER_REPLICAS, *_OBSERVED, FIRST_TOKEN_BUDGET]


class _Objective(NamedTuple):
    bound: str
    budget: float


class _Labels(NamedTuple):
    """The labels of one deployment's series, except its key."""

    model: str
    has_price: bool
    first_token_bound: str


class DeploymentMetrics:
    def __init__(self, metrics: Metrics) -> None:
        """`metrics` must contain `DEPLOYMENT_METRICS`; it may contain more."""
        self._metrics = metrics
        self._deployments: dict[str, _Labels] = {}
        """Labels of the exported series by deployment key."""

    def observed(self, observation: Observation) -> None:
        """Set replicas, GPUs and price of one deployment. If its spec cannot be read, the old values stay."""
        plan = observation.plan
        if plan is None:
            return
        objective = _first_token_objective(plan)
        labels = _Labels(plan.model_name, plan.replica_price is not None, objective.bound)
        if self._deployments.get(plan.key) != labels:
            self.forget_deployment(plan.key)
        self._deployments[plan.key] = labels
        num_live = sum(replica.live for replica in observation.replicas)
        values: dict[MetricSpec, float | None] = {
            DESIRED: plan.replicas,
            READY: len(observation.ready()),
            UPDATED: len(observation.ready_current()),
            MAX: plan.max_replicas,
            WITHOUT_GPUS: sum(replica.reason == INSUFFICIENT_GPU for replica in observation.replicas if replica.live),
            GPUS: num_live * plan.gpus_per_replica,
            HOUR_PRICE: None if plan.replica_price is None else num_live * plan.replica_price,
            ERROR_BUDGET: round(1 - plan.objective / 100, 6),
        }
        for spec, value in values.items():
            if value is not None:
                self._metrics.gauge(spec, model=plan.model_name, variant=plan.key).set(value)
        budget = self._metrics.gauge(FIRST_TOKEN_BUDGET, model=plan.model_name, variant=plan.key, le=objective.bound)
        budget.set(objective.budget)

    def forget_deployment(self, key: str) -> None:
        """Remove the series of a deployment that is deleted or whose labels have changed."""
        labels = self._deployments.pop(key, None)
        if labels is None:
            return
        for spec in _OBSERVED:
            self._metrics.forget(spec, model=labels.model, variant=key)
        self._metrics.forget(FIRST_TOKEN_BUDGET, model=labels.model, variant=key, le=labels.first_token_bound)

    def scaled(self, key: str, replicas: int) -> None:
        """Set the number of replicas that the autoscaler has decided on or recommends."""
        self._metrics.gauge(AUTOSCALER_REPLICAS, variant=key).set(replicas)

    def not_scaled(self, key: str) -> None:
        """Remove the autoscaler's series of a deployment that is not scaled any more."""
        self._metrics.forget(AUTOSCALER_REPLICAS, variant=key)

    def scrape(self, accept: str = "") -> Scrape:
        """Return the metrics in the format that the scraper's `Accept` header asks for."""
        return self._metrics.scrape(accept)


def _first_token_objective(plan: Plan) -> _Objective:
    slo = None if plan.autoscaling is None else plan.autoscaling.slo
    if slo is None or slo.ttft_ms is None:
        slo = DEFAULT_FIRST_TOKEN
    assert slo.ttft_ms is not None
    return _Objective(first_token_bound(slo.ttft_ms / 1000), round(1 - slo.share, 4))
