"""The cost of replicas in scaling decisions, from the resource's price to the message of each change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scaling_world import Scaled

from pagemill_operator.autoscaler.records import decode_record, encode_record, replay
from pagemill_operator.autoscaler.settings import HourlyCost, ScalingSettings, Slo
from pagemill_operator.plan import make_plan

SLO = ScalingSettings("Active", 1, 20, slo=Slo(ttft_ms=500.0, tpot_ms=40.0))
PRICED = msgspec.structs.replace(SLO, replica_price=2.5)


def risen(settings: ScalingSettings) -> Any:
    """Return the record of a rise."""
    scaled = Scaled(settings)
    scaled.decide(rate=30.0, active=1.0, running=7, waiting=2)
    (record,) = scaled.records
    return record


@pytest.mark.parametrize(("replicas", "price", "cost"), [(0, 2.5, 0.0), (3, 2.5, 7.5), (3, 0.0, 0.0), (3, None, None)])
def test_the_cost_of_an_hour_is_its_pod_seconds_times_the_price(
    replicas: int, price: float | None, cost: float | None
) -> None:
    settings = msgspec.structs.replace(SLO, replica_price=price)
    assert settings.cost_of(replicas) == HourlyCost(3600 * replicas, cost)


def test_the_message_of_a_change_states_the_cost_before_and_after() -> None:
    decision = risen(PRICED).decision
    assert decision.replicas > decision.replicas_before == 1
    assert decision.message.endswith(f"; {2.5 * decision.replicas:.2f} per hour instead of 2.50")


def test_without_a_price_messages_contain_no_cost() -> None:
    priced, unpriced = risen(PRICED).decision, risen(SLO).decision
    assert priced.message.startswith(f"{unpriced.message}; ")
    assert msgspec.structs.replace(priced, message="") == msgspec.structs.replace(unpriced, message="")


def test_a_record_with_a_price_is_replayed_equally() -> None:
    record = decode_record(encode_record(risen(PRICED)))
    assert replay(record) == record.decision


def test_a_record_of_the_previous_release_has_no_price() -> None:
    body = msgspec.to_builtins(risen(SLO))
    del body["settings"]["replica_price"]
    record = decode_record(msgspec.json.encode(body))
    assert record.settings.replica_price is None
    assert replay(record) == record.decision


@pytest.mark.parametrize(
    ("changes", "price"),
    [
        ({"cost": {"gpuHour": 2.5}, "resources": {"gpus": 1}}, 2.5),
        ({"cost": {"gpuHour": 2.5}}, None),
        ({"cost": {"hour": 0.5}}, 0.5),
        ({"resources": {"gpus": 1}}, None),
    ],
    ids=["one GPU", "no GPU", "CPUs", "no price"],
)
def test_the_cost_of_a_replica_is_its_price(deployment: Any, changes: dict[str, Any], price: float | None) -> None:
    plan = make_plan(deployment(autoscaling={"maxReplicas": 2}, **changes), "kubernetes")
    assert plan.autoscaling is not None
    assert plan.autoscaling.replica_price == price
