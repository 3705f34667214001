"""The scaler: its memory between decisions, its reports, and the learned start times."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hand_clock import Clock
from scaling_world import LENGTHS, arrivals, engines

from pagemill_operator.autoscaler.records import decode_record, encode_record, replay
from pagemill_operator.autoscaler.signals import GatewayReport
from pagemill_operator.backends.scaler import PATIENCE_S, Scaler
from pagemill_operator.backends.start_durations import StartDurations
from pagemill_operator.plan import make_plan
from pagemill_operator.plan.types import Plan
from pagemill_operator.status.conditions import find_conditions
from pagemill_operator.status.observation import Observation, ReplicaObservation
from pagemill_protocol.report.histogram import histogram_of
from pagemill_protocol.report.load import DeploymentLoad, EnginesLoad, EngineStart, Latencies, Lengths, QueueLoad

QUEUE = QueueLoad(num_requests=6, num_tokens=10)
KEY = "default/chat"
MakePlan = Callable[..., Plan]


@pytest.fixture
def plan(deployment: Any) -> MakePlan:
    def make(replicas: int = 1, **autoscaling: Any) -> Plan:
        return make_plan(deployment(replicas=replicas, autoscaling={"maxReplicas": 5, **autoscaling}), "kubernetes")

    return make


class World:
    def __init__(self, plan: Plan) -> None:
        self.clock = Clock()
        self.scaler = Scaler(self.clock)
        self.plan = plan
        self.phases = ["ready"] * plan.replicas

    @property
    def seen(self) -> Observation:
        digest = self.plan.groups[0].digest
        replicas = [ReplicaObservation(f"chat-{n}", phase, digest) for n, phase in enumerate(self.phases)]
        return Observation(self.plan, tuple(replicas), gateway_ready=True, scaling=self.scaler.state(KEY))

    def decide(self, *reports: GatewayReport, **load: Any) -> Any:
        assert self.plan.autoscaling is not None
        known = {"engines": engines(self.phases.count("ready")), "arrivals": arrivals(1.0), "lengths": LENGTHS}
        reported = (
            [GatewayReport(DeploymentLoad(namespace="default", name="chat", **(known | load)))]
            if load or not reports
            else []
        )
        return self.scaler.decide(
            KEY, self.plan.autoscaling, self.seen, reported, start=self.plan.spec_replicas, num_gateways=1
        )

    def condition(self, type_: str) -> tuple[str, str, str]:
        (found,) = [each for each in find_conditions(self.seen) if each.type == type_]
        return found.status, found.reason, found.message


def test_only_an_active_deployment_gets_the_decided_number(plan: MakePlan) -> None:
    world = World(plan())
    assert world.scaler.wanted(KEY, 2, world.plan.autoscaling) == 2, "no decision was made yet"
    record = world.decide(queue=QUEUE, lengths=Lengths())
    assert record.decision.reason == "ScaledUp"
    assert world.scaler.wanted(KEY, 1, world.plan.autoscaling) == 3
    assert world.scaler.wanted(KEY, 1, None) == 1
    assert world.scaler.keep([]) == {KEY}
    assert world.scaler.wanted(KEY, 1, world.plan.autoscaling) == 1


def test_decisions_count_groups_and_not_their_pods(deployment: Any) -> None:
    """Two pods with two GPUs each are one replica, whose price is that of four GPUs."""
    changes = {
        "engine__tensorParallel": 4, "resources__gpus": 2, "replicas": 1, "autoscaling": {"maxReplicas": 5},
        "cost__gpuHour": 2.0,
    }  # fmt: skip
    plan = make_plan(deployment(**changes), "kubernetes")
    assert (plan.problems, plan.pods_per_replica, plan.gpus_per_replica, plan.replica_price) == ((), 2, 4, 8.0)
    world = World(plan)
    assert world.decide(queue=QUEUE, lengths=Lengths()).decision.replicas == 3
    assert world.scaler.wanted(KEY, 1, plan.autoscaling) == 3
    scaled = make_plan(deployment(**changes | {"replicas": 3}), "kubernetes")
    (group,) = scaled.groups
    assert (group.replicas, group.pods_per_replica, group.process.gpus) == (3, 2, 2)


def test_advice_is_reported_and_not_applied(plan: MakePlan) -> None:
    world = World(plan(mode="Advisory"))
    record = world.decide(queue=QUEUE, lengths=Lengths())
    assert record.decision.replicas == 3
    assert world.scaler.wanted(KEY, 1, world.plan.autoscaling) == 1
    assert world.condition("ScalingActive") == (
        "True",
        "AdvisoryOnly",
        "the autoscaler recommends 3 replicas; in mode Advisory spec.replicas applies",
    )
    assert world.decide(queue=QUEUE, lengths=Lengths()) is None, "the same advice must not be reported again"


def test_only_changes_are_recorded_and_every_record_can_be_replayed(plan: MakePlan) -> None:
    world = World(plan())
    for number in range(20):
        world.clock.now += 2
        world.decide(queue=QUEUE if number > 9 else QueueLoad(), lengths=Lengths())
    records = world.scaler.records([KEY])
    assert [record.decision.reason for record in records] == ["Steady", "ScaledUp", "Steady", "Steady"], (
        "and the latest one"
    )
    assert [record.decision for record in records] == [replay(decode_record(encode_record(each))) for each in records]
    assert world.scaler.records(["default/other"]) == []


def test_under_a_steady_overload_the_latest_record_has_the_present_rate_and_says_that_the_maximum_is_too_few(
    plan: MakePlan,
) -> None:
    """A decision that changes nothing is recorded once; its inputs must not be those of the beginning for ever."""
    world = World(plan(replicas=5))
    for second in range(60):
        world.clock.now += 1
        rate = min(2.0, 0.3 + second / 15)
        record = world.decide(queue=QueueLoad(num_requests=32, num_tokens=10**7), arrivals=arrivals(rate))
        if second > 20:
            assert record is None, "nothing new"
    (latest,) = world.scaler.records([KEY])[-1:]
    assert latest.signals.arrivals.requests_per_s == 2.0
    assert latest.decision.reason in ("AtMaximum", "Saturated")
    assert "maxReplicas is 5" in latest.decision.message
    assert replay(decode_record(encode_record(latest))) == latest.decision


def test_missing_signals_are_a_condition(plan: MakePlan) -> None:
    world = World(plan(replicas=2))
    world.decide(queue=QueueLoad())
    assert world.decide(engines=engines(1)) is not None, "a record must say why nothing is removed"
    assert world.condition("ScalingActive")[:2] == ("True", "ScalingActive"), "a short silence must not be reported"
    world.clock.now += PATIENCE_S
    assert world.decide(engines=engines(1)) is not None, "users must be informed"
    status, reason, message = world.condition("ScalingActive")
    assert (status, reason) == ("False", "SignalsMissing")
    assert "the engines' reports are stale" in message
    assert world.decide(engines=engines(1)) is None
    assert world.decide(queue=QueueLoad()) is not None
    assert world.condition("ScalingActive")[:2] == ("True", "ScalingActive")


def test_a_new_leader_reports_nothing_until_it_has_a_report_or_a_timeout(plan: MakePlan) -> None:
    world = World(plan())
    assert world.condition("ScalingActive")[:2] == ("Unknown", "NotDecided")
    world.decide(engines=EnginesLoad())
    assert world.condition("ScalingActive")[:2] == ("Unknown", "NotDecided"), "no engine has reported yet"
    world.clock.now += PATIENCE_S
    world.decide(engines=EnginesLoad())
    assert world.condition("ScalingActive")[:2] == ("False", "SignalsMissing")


@pytest.mark.parametrize(
    ("ttft_ms", "slo", "expected"),
    [
        (100.0, {"ttft": "500ms"}, ("True", "WithinSLO")),
        (900.0, {"ttft": "500ms"}, ("False", "OutsideSLO")),
        (None, {"ttft": "500ms"}, ("Unknown", "NotMeasured")),
        (100.0, {"tpot": "1ms"}, ("False", "UnreachableSLO")),
    ],
    ids=str,
)
def test_the_latencies_that_clients_saw_are_a_condition(
    plan: MakePlan, ttft_ms: float | None, slo: dict[str, str], expected: tuple[str, str]
) -> None:
    world = World(plan(slo=slo))
    seen = histogram_of([ttft_ms] * 50) if ttft_ms is not None else histogram_of([])
    world.decide(latencies=Latencies(truth="value", ttft_ms=seen, tpot_ms=histogram_of([0.5] * 50)))
    assert world.condition("SLOMet")[:2] == expected


def test_a_fixed_number_has_no_autoscaler(deployment: Any) -> None:
    seen = Observation(make_plan(deployment()), gateway_ready=True)
    conditions = {each.type: each.reason for each in find_conditions(seen)}
    assert (conditions["ScalingActive"], conditions["SLOMet"]) == ("NotConfigured", "NotMeasured")


def test_at_zero_the_condition_says_what_starts_a_replica(plan: MakePlan) -> None:
    world = World(plan(replicas=0, minReplicas=0))
    status, reason, message = world.condition("Ready")
    assert (status, reason, message) == (
        "False",
        "ScaledToZero",
        "there are no requests; the next one starts a replica",
    )
    fixed = replace(world.seen, plan=replace(world.plan, autoscaling=None))
    (ready,) = [each for each in find_conditions(fixed) if each.type == "Ready"]
    assert "spec.replicas is 0: raise it" in ready.message


def test_until_a_start_was_seen_the_longest_that_engines_report_counts() -> None:
    starts = StartDurations()
    starts.reported([EngineStart("a", {"load": 30.0, "warm": 5.0}), EngineStart("b", {"load": 50.0, "wake": 9.0}, 1)])
    assert starts.learned_s == 50.0, "the time of a wake is none of a start"
    starts.reported([EngineStart("a", {"load": math.inf}), EngineStart("b", {})])
    assert starts.learned_s == 50.0, "it stays known while no engine reports one"
    starts.observe([ReplicaObservation("c", "pending")], 0.0)
    starts.observe([ReplicaObservation("c", "ready")], 70.0)
    assert starts.learned_s == 70.0


def test_cold_starts_are_learned_from_completely_observed_starts() -> None:
    starts = StartDurations()

    def saw(now: float, **phases: Any) -> None:
        starts.observe([ReplicaObservation(name, phase) for name, phase in phases.items()], now)

    saw(0.0, old="ready")
    assert starts.learned_s is None
    saw(10.0, old="ready", a="pending")
    saw(30.0, old="ready", a="loading")
    assert starts.oldest_s(35.0) == 25.0
    saw(50.0, old="ready", a="ready")
    assert starts.learned_s == 40.0
    saw(60.0, old="ready", a="ready", gone="loading")
    saw(70.0, old="loading", a="ready")
    assert starts.oldest_s(70.0) == 0.0, "a replica that was ready does not count as a new start"
    saw(80.0, b="starting")
    saw(90.0, b="ready")
    assert starts.learned_s == 40.0, "the conservative quantile of 10 and 40 s"
