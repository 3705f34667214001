"""The interface of scaling policies: names, policies of other packages, and the operator's use of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import foreign_policy
import msgspec
import pytest
from hand_clock import Clock
from scaling_world import Scaled, arrivals, engines

from pagemill_crds.sections.autoscaling import AutoscalingSection
from pagemill_operator.autoscaler.records import decode_record, encode_record, replay
from pagemill_operator.autoscaler.registry import BUILT_IN, UnknownPolicyError, find_policy, registered
from pagemill_operator.autoscaler.settings import DEFAULT_POLICY, ScalingSettings, settings_of
from pagemill_operator.autoscaler.signals import Fleet, GatewayReport, merge
from pagemill_operator.backends.scaler import Scaler
from pagemill_operator.plan import Plan, make_plan
from pagemill_operator.status.conditions import find_conditions
from pagemill_operator.status.observation import Observation, ReplicaObservation
from pagemill_protocol.report.load import DeploymentLoad, EngineReport, Lengths, QueueLoad
from pagemill_protocol.report.state import EngineLoad

KEY = "default/chat"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield lambda entries, *module: foreign_policy.install(tmp_path, monkeypatch, entries, *module)
    monkeypatch.undo()
    sys.modules.pop("foreign_policies", None)
    foreign_policy.uninstall()


@pytest.fixture
def foreign(install: Install) -> None:
    install({foreign_policy.NAME: "foreign_policies:PerRequest"})


class World:
    """One deployment under the operator's scaler, with replicas in these phases."""

    def __init__(self, plan: Plan) -> None:
        self.clock, self.plan = Clock(), plan
        self.scaler = Scaler(self.clock)
        self.phases = ["ready"] * plan.spec_replicas

    def decide(self, plan: Plan | None = None, **load: Any) -> Any:
        self.plan = plan or self.plan
        assert self.plan.autoscaling is not None
        self.clock.now += 2
        digest = self.plan.groups[0].digest
        replicas = tuple(ReplicaObservation(f"chat-{n}", phase, digest) for n, phase in enumerate(self.phases))
        seen = Observation(self.plan, replicas, gateway_ready=True)
        known = {"engines": engines(len(replicas)), "arrivals": arrivals(1.0), "lengths": Lengths()}
        reports = [GatewayReport(DeploymentLoad(namespace="default", name="chat", **(known | load)))]
        start = self.plan.spec_replicas
        return self.scaler.decide(KEY, self.plan.autoscaling, seen, reports, start=start, num_gateways=1)

    @property
    def wanted(self) -> int:
        return self.scaler.wanted(KEY, self.plan.spec_replicas, self.plan.autoscaling)


@pytest.fixture
def plan(deployment: Any) -> Callable[..., Plan]:
    def make(**autoscaling: Any) -> Plan:
        return make_plan(deployment(autoscaling={"maxReplicas": 5, **autoscaling}), "kubernetes")

    return make


def held(*running: int) -> list[EngineReport]:
    return [EngineReport(f"engine-{n}", EngineLoad(num_requests_running=count)) for n, count in enumerate(running)]


# Names


def test_a_resource_without_a_policy_uses_the_default() -> None:
    section = AutoscalingSection.model_validate({"maxReplicas": 4})
    settings = settings_of(section)
    assert settings is not None
    assert section.policy == settings.policy == DEFAULT_POLICY == "Demand"
    assert list(BUILT_IN) == ["Demand", "TargetTracking"]


@pytest.mark.parametrize("backend", ["local", "kubernetes"])
def test_a_policy_that_is_not_installed_is_a_condition_with_the_installed_names(deployment: Any, backend: Any) -> None:
    plan = make_plan(deployment(autoscaling={"maxReplicas": 2, "policy": "Oracle"}), backend)
    (problem,) = plan.problems
    assert (problem.field, problem.value) == ("spec.autoscaling.policy", "Oracle")
    planned = next(each for each in find_conditions(Observation(plan)) if each.type == "Planned")
    assert (planned.status, planned.reason) == ("False", "UnsupportedField")
    assert "there is no scaling policy Oracle; there are Demand, TargetTracking; choose one of them" in planned.message


@pytest.mark.parametrize("name", ["", "-x", "a b", "x" * 64])
def test_an_invalid_policy_name_is_refused_by_the_resource(name: str) -> None:
    with pytest.raises(ValueError, match="policy"):
        AutoscalingSection.model_validate({"maxReplicas": 2, "policy": name})


def test_mode_external_and_a_policy_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="another controller decides: remove policy"):
        AutoscalingSection.model_validate({"maxReplicas": 2, "mode": "External", "policy": "TargetTracking"})


# Policies of other packages


@pytest.mark.usefixtures("foreign")
def test_a_package_adds_a_policy_with_an_entry_point(plan: Callable[..., Plan]) -> None:
    assert list(registered().policies) == ["Demand", "TargetTracking", "PerRequest"]
    assert plan(policy="PerRequest").problems == ()


def test_a_package_that_cannot_be_loaded_affects_only_its_own_policies(install: Install, deployment: Any) -> None:
    install({"Broken": "foreign_policies:Missing", "Demand": "foreign_policies:PerRequest", "Other": "nowhere:X"})
    assert list(registered().policies) == ["Demand", "TargetTracking"]
    assert find_policy("Demand") is BUILT_IN["Demand"], "no package may replace a built-in policy"
    with pytest.raises(UnknownPolicyError, match="Broken cannot be loaded: foreign_policies:Missing: AttributeError"):
        find_policy("Broken")
    (problem,) = make_plan(deployment(autoscaling={"maxReplicas": 2, "policy": "Other"})).problems
    assert "No module named 'nowhere'" in problem.message


def test_an_entry_point_must_have_the_name_of_its_policy(install: Install) -> None:
    install({"Alias": "foreign_policies:PerRequest"})
    with pytest.raises(UnknownPolicyError, match="its name is 'PerRequest'; it must be that of its entry point"):
        find_policy("Alias")


# Policies in the operator's scaler


@pytest.mark.usefixtures("foreign")
def test_the_scaler_follows_a_policy_of_another_package_and_its_records_can_be_replayed(
    plan: Callable[..., Plan],
) -> None:
    world = World(plan(policy="PerRequest"))
    record = world.decide(replicas=held(9))
    assert (record.decision.replicas, record.decision.reason) == (3, "ScaledUp")
    assert record.decision.message == "9 requests run"
    assert world.wanted == 3
    world.phases = ["ready"] * 3
    assert world.decide(replicas=held(1, 0, 0)).decision.reason == "Steady", "the policy must get its memory"
    assert world.wanted == 3
    records = [decode_record(encode_record(each)) for each in world.scaler.records()]
    assert {each.settings.policy for each in records} == {"PerRequest"}
    assert [replay(each) for each in records] == [each.decision for each in records]


@pytest.mark.usefixtures("foreign")
def test_bounds_hold_whatever_a_policy_returns(plan: Callable[..., Plan]) -> None:
    world = World(plan(policy="PerRequest"))
    record = world.decide(replicas=held(99))
    assert (record.decision.replicas, record.decision.reason) == (5, "OutOfBounds")
    assert "25 replicas are out of bounds: minReplicas 1 and maxReplicas 5" in record.decision.message
    assert replay(decode_record(encode_record(record))) == record.decision


@pytest.mark.usefixtures("foreign")
def test_another_policy_starts_with_an_empty_memory(plan: Callable[..., Plan]) -> None:
    world = World(plan(policy="PerRequest"))
    world.decide(replicas=held(9))
    queue = QueueLoad(num_requests=8, num_tokens=10)
    assert world.decide(plan(), queue=queue).decision.replicas == 4, "it starts from the number that was decided before"
    assert world.decide(plan(policy="PerRequest"), replicas=held(1)).memory == msgspec.structs.replace(
        find_policy("PerRequest").memory_type()
    )


def test_only_a_policy_that_requests_it_gets_each_replica(plan: Callable[..., Plan]) -> None:
    assert World(plan()).decide(replicas=held(9)).signals.replicas == ()


def test_each_replica_is_reported_once_by_the_gateway_with_the_most_reports() -> None:
    def view(*reports: EngineReport) -> GatewayReport:
        return GatewayReport(DeploymentLoad(namespace="default", name="chat", replicas=list(reports)))

    idle, busy = EngineLoad(), EngineLoad(num_kv_bytes_active=4, num_requests_running=2)
    impossible = EngineReport("c", EngineLoad(step_ms=math.inf))
    reports = [view(EngineReport("b", busy), EngineReport("a", idle), impossible), view(EngineReport("b", idle, 9))]
    signals = merge(reports, Fleet(wanted=2), num_gateways=2, at_s=0.0, has_replicas=True)
    assert signals.replicas == (EngineReport("a", idle), EngineReport("b", busy))


@pytest.mark.usefixtures("foreign")
def test_a_decision_is_replayed_by_the_policy_that_made_it() -> None:
    scaled = Scaled(ScalingSettings("Active", 1, 5, policy="PerRequest"))
    scaled.decide(rate=1.0)
    foreign_record = decode_record(encode_record(scaled.records[0]))
    own = msgspec.structs.replace(foreign_record, settings=ScalingSettings("Active", 1, 5, kv_cache_usage=0.8))
    assert replay(foreign_record).goals == ()
    assert [goal.name for goal in replay(msgspec.structs.replace(own, memory={})).goals][:1] == ["requests"]
