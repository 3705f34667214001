"""The operator's metrics of each deployment: replicas, GPUs and the price, while the deployment exists."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagemill_operator.autoscaler.settings import ScalingSettings, Slo
from pagemill_operator.controller.reporting.metrics import OperatorMetrics
from pagemill_operator.plan.types import Group, Plan, Process
from pagemill_operator.status.observation import INSUFFICIENT_GPU, Observation, ReplicaObservation
from pagemill_protocol.resource.served import ServedModel

ENGINE = Process("pagemill_engine.server", {}, gpus=2)
PLAN = Plan(
    "default",
    "chat",
    1,
    ServedModel(name="tiny"),
    "hf://x",
    (Group("chat", 3, ENGINE, digest="new"),),
    replica_price=2.5,
)
REPLICAS = (
    ReplicaObservation("chat-0", "ready", "new"),
    ReplicaObservation("chat-1", "ready", "old"),
    ReplicaObservation("chat-2", "asleep", "new"),
    ReplicaObservation("chat-4", "pending", "new", INSUFFICIENT_GPU),
    ReplicaObservation("chat-3", "gone", "old"),
)


def series(metrics: OperatorMetrics) -> dict[tuple[str, str], float]:
    """Return the values by (name without the prefix, model)."""
    families = text_string_to_metric_families(metrics.scrape().body.decode())
    samples = [sample for family in families for sample in family.samples]
    prefix = "pagemill_deployment_"
    return {(s.name[len(prefix) :], s.labels["model"]): s.value for s in samples if s.name.startswith(prefix)}


def with_slo(ttft_ms: float | None) -> Plan:
    slo = Slo(ttft_ms, tpot_ms=50, share=0.9)
    return replace(PLAN, autoscaling=ScalingSettings("Active", min_replicas=1, max_replicas=3, slo=slo))


def budgets(metrics: OperatorMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.scrape().body.decode())
    samples = [sample for family in families for sample in family.samples]
    return {s.labels["le"]: s.value for s in samples if s.name == "pagemill_deployment_first_token_budget_ratio"}


def test_replicas_gpus_and_price_are_those_of_the_deployment() -> None:
    metrics = OperatorMetrics()
    metrics.observed(Observation(PLAN, REPLICAS))
    assert series(metrics) == {
        ("desired_replicas", "tiny"): 3,
        ("ready_replicas", "tiny"): 2,
        ("updated_replicas", "tiny"): 1,
        ("max_replicas", "tiny"): 3,
        ("gpus", "tiny"): 8,
        ("replicas_without_gpus", "tiny"): 1,
        ("hour_price", "tiny"): 10,
        ("error_budget_ratio", "tiny"): 0.005,
        ("first_token_budget_ratio", "tiny"): 0.05,
    }


def test_a_removed_price_is_no_longer_exported() -> None:
    metrics = OperatorMetrics()
    metrics.observed(Observation(PLAN, REPLICAS))
    metrics.observed(Observation(replace(PLAN, replica_price=None, objective=99.9), REPLICAS))
    assert ("hour_price", "tiny") not in series(metrics)
    assert series(metrics)["error_budget_ratio", "tiny"] == 0.001
    assert series(metrics)["gpus", "tiny"] == 8


@pytest.mark.parametrize(
    ("ttft_ms", "bound"), [(400, "0.5"), (500, "0.5"), (501, "0.75"), (900, "1.0"), (9_000_000, "+Inf")]
)
def test_the_share_of_late_first_tokens_names_the_bucket_of_the_histogram(ttft_ms: float, bound: str) -> None:
    metrics = OperatorMetrics()
    metrics.observed(Observation(with_slo(ttft_ms), REPLICAS))
    assert budgets(metrics) == {bound: 0.1}


def test_a_changed_or_removed_slo_leaves_no_series() -> None:
    metrics = OperatorMetrics()
    metrics.observed(Observation(with_slo(400), REPLICAS))
    metrics.observed(Observation(with_slo(2000), REPLICAS))
    assert budgets(metrics) == {"2.5": 0.1}
    metrics.observed(Observation(with_slo(None), REPLICAS))
    assert budgets(metrics) == {"2.5": 0.05}, "the default"


def test_another_model_name_replaces_the_series() -> None:
    metrics = OperatorMetrics()
    metrics.observed(Observation(PLAN, REPLICAS))
    metrics.observed(Observation(replace(PLAN, served=ServedModel(name="large")), REPLICAS))
    assert {model for _, model in series(metrics)} == {"large"}


def test_an_unreadable_spec_keeps_the_series() -> None:
    metrics = OperatorMetrics()
    metrics.observed(Observation(PLAN, REPLICAS))
    before = series(metrics)
    metrics.observed(Observation(None))
    assert series(metrics) == before


def test_a_deleted_deployment_has_no_series() -> None:
    metrics = OperatorMetrics()
    metrics.observed(Observation(PLAN, REPLICAS))
    metrics.forget_deployment(PLAN.key)
    metrics.forget_deployment(PLAN.key)
    assert series(metrics) == {}
