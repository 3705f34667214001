"""Conditions name the true cause, and their transition times change only with their status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from observed_world import CONDITION_TYPES

from pagemill_crds.models import LLMDeployment
from pagemill_operator.plan import Plan, Problem, make_plan
from pagemill_operator.status.conditions import (
    Finding,
    Observation,
    ReplicaObservation,
    find_conditions,
    merge_conditions,
)

Make = Callable[..., LLMDeployment]


def plan_of(deployment: Make, replicas: int = 2) -> Plan:
    return make_plan(deployment(replicas=replicas))


def running(plan: Plan, *phases: str, reason: str = "", message: str = "") -> tuple[ReplicaObservation, ...]:
    digest = plan.groups[0].digest
    return tuple(
        ReplicaObservation(f"chat-{i}", phase, digest, reason, message)  # type: ignore[arg-type]
        for i, phase in enumerate(phases)
    )


def by_type(seen: Observation) -> dict[str, Finding]:
    return {finding.type: finding for finding in find_conditions(seen)}


def test_every_condition_always_exists(deployment: Make) -> None:
    types = [finding.type for finding in find_conditions(Observation(plan_of(deployment)))]
    assert types == list(CONDITION_TYPES)


def test_with_all_replicas_ready_the_deployment_is_ready(deployment: Make) -> None:
    plan = plan_of(deployment)
    found = by_type(Observation(plan, running(plan, "ready", "ready"), gateway_ready=True))
    assert found["Ready"][1:3] == ("True", "AllReplicasReady")
    assert found["Serving"].status == "True"


def test_during_loading_the_message_names_the_phase(deployment: Make) -> None:
    plan = plan_of(deployment)
    replicas = running(plan, "loading", "starting", message="loading weights 40 %")
    found = by_type(Observation(plan, replicas, gateway_ready=True))
    assert found["ModelLoaded"][1:] == ("False", "Loading", "chat-0: loading weights 40 %")
    assert found["Ready"].reason == "Loading"


def test_with_one_of_two_ready_the_model_is_served_but_not_ready(deployment: Make) -> None:
    plan = plan_of(deployment)
    found = by_type(Observation(plan, running(plan, "ready", "loading"), gateway_ready=True))
    assert found["Serving"].status == "True"
    assert found["Ready"][1:3] == ("False", "Progressing")
    assert "1 of 2" in found["Ready"].message


def test_a_crash_has_its_own_reason(deployment: Make) -> None:
    plan = plan_of(deployment, 1)
    replicas = running(plan, "crashed", reason="ModelNotFound", message="no such file")
    found = by_type(Observation(plan, replicas, gateway_ready=True))
    assert found["ModelLoaded"][1:] == ("False", "ModelNotFound", "no such file")
    assert found["Ready"].reason == "ModelNotFound"


def test_old_replicas_do_not_count_as_ready(deployment: Make) -> None:
    plan = plan_of(deployment, 1)
    old = tuple(replace(replica, digest="old") for replica in running(plan, "ready"))
    found = by_type(Observation(plan, old, gateway_ready=True))
    assert found["Serving"].status == "True"
    assert found["Ready"].status == "False"


def test_replicas_of_an_earlier_spec_do_not_count_for_the_current_one(deployment: Make) -> None:
    plan = plan_of(deployment)
    older = tuple(ReplicaObservation(f"old-{i}", "ready", "older") for i in range(2))
    found = by_type(Observation(plan, (*older, *running(plan, "starting")), gateway_ready=True))
    assert found["Scheduled"][1:] == ("False", "Starting", "1 of 2 replicas are placed")
    found = by_type(Observation(plan, (*older, *running(plan, "starting", "crashed")), gateway_ready=True))
    assert found["Scheduled"].status == "True"


def test_a_gateway_that_is_not_ready_is_the_reason(deployment: Make) -> None:
    plan = plan_of(deployment, 1)
    assert by_type(Observation(plan, running(plan, "ready")))["Ready"].reason == "GatewayNotReady"


def test_conflicts_and_invalid_specs_take_precedence(deployment: Make) -> None:
    plan = plan_of(deployment, 1)
    conflict = Problem("spec.model.name", "m", "taken")
    found = by_type(Observation(plan, gateway_ready=True, conflict=conflict))
    assert found["Ready"][1:3] == ("False", "NameConflict")
    unsupported = make_plan(deployment(engine__quantization="fp8"))
    assert by_type(Observation(unsupported))["Ready"].reason == "UnsupportedField"


def test_a_deployment_that_lost_its_name_serves_nothing_although_its_replicas_are_ready(deployment: Make) -> None:
    plan = plan_of(deployment, 1)
    conflict = Problem("spec.model.name", "m", "taken")
    older = (ReplicaObservation("chat-0", "ready", "older"),)
    for replicas in (running(plan, "ready"), older):
        found = by_type(Observation(plan, replicas, gateway_ready=True, conflict=conflict))
        assert found["Serving"][1:3] == ("False", "NameConflict")
        assert found["Ready"][1:3] == ("False", "NameConflict")
        assert not any("still serve" in finding.message for finding in found.values())


def test_an_unreadable_source_leaves_the_plan_unknown(deployment: Make) -> None:
    plan = plan_of(deployment, 1)
    unplanned = Problem("spec.model.source", "s3://x", "only the pods can read it")
    found = by_type(Observation(plan, running(plan, "ready"), gateway_ready=True, unplanned=unplanned))
    assert found["Planned"].status == "Unknown"
    assert found["Ready"].status == "True"


def test_a_model_that_no_replica_can_compute_makes_the_plan_false(deployment: Make) -> None:
    plan = plan_of(deployment, 2)
    unplanned = Problem("spec.model.source", "hf://org/model", "only the pods can read it")
    why = "`config.json` has the architecture `LlamaForCausalLM` with the rope scaling `dynamic`"
    replicas = running(plan, "crashed", "loading", reason="UnsupportedArchitecture", message=why)
    found = by_type(Observation(plan, replicas, gateway_ready=True, unplanned=unplanned))
    assert found["Planned"][1:] == ("False", "UnsupportedArchitecture", why)
    assert found["ModelLoaded"][1:] == ("False", "UnsupportedArchitecture", why)
    assert found["Ready"][1:3] == ("False", "UnsupportedArchitecture")
    loader = ReplicaObservation("loader", "crashed", "", "UnsupportedArchitecture", why)
    found = by_type(Observation(plan, gateway_ready=True, loader=loader, unplanned=unplanned))
    assert found["Planned"][1:3] == ("False", "UnsupportedArchitecture")
    ready = running(plan, "ready", "crashed", reason="UnsupportedArchitecture", message=why)
    assert by_type(Observation(plan, ready, gateway_ready=True))["Planned"].status == "True"


def test_transition_times_change_only_with_the_status(deployment: Make) -> None:
    plan = plan_of(deployment, 1)
    loading = find_conditions(Observation(plan, running(plan, "loading", message="a"), gateway_ready=True))
    first = merge_conditions([], loading, 1, "2026-01-01T00:00:00Z")
    still = find_conditions(Observation(plan, running(plan, "loading", message="b"), gateway_ready=True))
    second = merge_conditions(first, still, 2, "2026-01-01T00:01:00Z")
    ready = find_conditions(Observation(plan, running(plan, "ready"), gateway_ready=True))
    third = merge_conditions(second, ready, 2, "2026-01-01T00:02:00Z")
    times = [{c.type: c.last_transition_time for c in conditions}["Ready"] for conditions in (first, second, third)]
    assert times == ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z", "2026-01-01T00:02:00Z"]
    assert {c.observed_generation for c in third} == {2}
    assert "b" in {c.type: c.message for c in second}["ModelLoaded"]


def test_the_reported_condition_remains_until_a_new_leader_has_decided(deployment: Make) -> None:
    scaled = make_plan(deployment(autoscaling={"maxReplicas": 2}))
    undecided = [each for each in find_conditions(Observation(scaled)) if each.type in ("ScalingActive", "SLOMet")]
    assert {each.reason for each in undecided} == {"NotDecided"}
    reported = [
        Finding("ScalingActive", "True", "ScalingActive", "x"),
        Finding("SLOMet", "False", "OutsideSLO", "slow"),
    ]
    before = merge_conditions([], reported, 1, "2026-01-01T00:00:00Z")
    after = merge_conditions(before, undecided, 2, "2026-01-02T00:00:00Z")
    assert [(each.reason, each.observed_generation, each.last_transition_time) for each in after] == [
        ("ScalingActive", 2, "2026-01-01T00:00:00Z"),
        ("OutsideSLO", 2, "2026-01-01T00:00:00Z"),
    ]
    fixed = merge_conditions([], find_conditions(Observation(plan_of(deployment))), 1, "2026-01-01T00:00:00Z")
    after = merge_conditions(fixed, undecided, 2, "2026-01-02T00:00:00Z")
    assert after[0].reason == "NotDecided", "a fixed number of replicas no longer applies"
