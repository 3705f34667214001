"""The written status is complete, stable while nothing changes, and readable by the API's own models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from engine_reports import used
from hypothesis import given
from hypothesis import strategies as st
from observed_world import CONDITION_TYPES

from pagemill_crds.models import LLMDeployment
from pagemill_crds.status import LLMDeploymentStatus
from pagemill_operator.backends.kubernetes.observe import observe, status_body, status_wait_s
from pagemill_operator.backends.kubernetes.snapshot import Snapshot
from pagemill_operator.plan import Plan, make_plan
from pagemill_operator.status.conditions import events_between
from pagemill_operator.status.load import REQUEST_STEPS, coarse, next_load, summarize
from pagemill_operator.status.observation import Fault, LastStart, Observation, ReplicaObservation
from pagemill_protocol.report.state import EngineLoad

Make = Callable[..., LLMDeployment]
T0, T1, T2 = "2026-01-01T00:00:00Z", "2026-01-01T00:00:10Z", "2026-01-01T00:01:00Z"
URL = "http://pagemill-gateway.pagemill-system"


def snapshot(status: dict[str, Any] | None = None, *, generation: int = 1, load: EngineLoad | None = None) -> Snapshot:
    metadata = {"name": "chat", "namespace": "default", "generation": generation, "uid": "uid"}
    return Snapshot({"metadata": metadata, "status": status or {}}, num_gateways=1, num_gateways_ready=1, load=load)


def seen(plan: Plan, *phases: str, reason: str = "", message: str = "") -> Observation:
    digest = plan.groups[0].digest
    replicas = (ReplicaObservation(f"p{i}", phase, digest, reason, message) for i, phase in enumerate(phases))  # type: ignore[arg-type]
    return Observation(plan, tuple(replicas), gateway_ready=True)


def written(body: dict[str, Any]) -> dict[str, Any]:
    """Return the status as the API server returns it."""
    read: dict[str, Any] = json.loads(json.dumps(body))
    return read


def test_the_first_status_has_every_condition_and_count(deployment: Make) -> None:
    plan = make_plan(deployment(replicas=2), "kubernetes")
    body = status_body(snapshot(), observe(snapshot(), plan), URL, T0)
    status = LLMDeploymentStatus.model_validate(written(body))
    assert [condition.type for condition in status.conditions] == list(CONDITION_TYPES)
    assert {condition.observed_generation for condition in status.conditions} == {1}
    assert (status.observed_generation, status.replicas, status.desired_replicas, status.ready_replicas) == (1, 0, 2, 0)
    assert status.selector == "pagemill.dev/deployment=chat,app.kubernetes.io/component=engine"
    assert status.url == URL
    assert status.plan is not None
    assert status.plan.model_name == "chat"
    assert "load" not in body


def test_without_changes_the_status_is_equal(deployment: Make) -> None:
    plan = make_plan(deployment(replicas=2, resources={"gpus": 1}), "kubernetes")
    observation = seen(plan, "ready", "loading")
    load = used(0.42, 7, 3)
    first = written(status_body(snapshot(load=load), observation, URL, T0))
    assert status_body(snapshot(first, load=load), observation, URL, T2) == first


def test_the_name_before_a_change_is_shown_for_ten_minutes_and_until_the_rollout_ends(deployment: Make) -> None:
    def shown(before: dict[str, Any], plan: Plan, observation: Observation, now: str) -> dict[str, Any]:
        return written(status_body(snapshot(before, generation=2), observation, URL, now))

    first = written(status_body(snapshot(), seen(make_plan(deployment(), "kubernetes"), "ready"), URL, T0))
    assert "formerName" not in first["plan"]
    plan = make_plan(deployment(model__name="new"), "kubernetes")
    names = ("modelName", "formerName", "formerUntil")
    second = shown(first, plan, seen(plan, "ready"), "2026-01-02T03:00:00Z")
    assert [second["plan"].get(name) for name in names] == ["new", "chat", "2026-01-02T03:10:00Z"]
    assert status_wait_s(snapshot(second), "2026-01-02T03:04:00Z") == 360
    later = shown(second, plan, seen(plan, "ready"), "2026-01-02T03:09:59Z")
    assert later["plan"] == second["plan"]
    rolling = replace(seen(plan, "loading"), replicas=(ReplicaObservation("0", "ready", "older"),))
    assert shown(second, plan, rolling, "2026-01-02T04:00:00Z")["plan"]["formerName"] == "chat"
    ended = shown(second, plan, seen(plan, "ready"), "2026-01-02T03:10:00Z")
    assert [ended["plan"].get(name) for name in names] == ["new", None, None]
    assert status_wait_s(snapshot(ended), "2026-01-02T03:10:00Z") is None
    back = make_plan(deployment(), "kubernetes")
    third = shown(second, back, seen(back, "ready"), "2026-01-02T03:05:00Z")
    assert [third["plan"].get(name) for name in names] == ["chat", "new", "2026-01-02T03:15:00Z"]


def test_an_edit_is_observed_in_every_condition(deployment: Make) -> None:
    plan = make_plan(deployment(), "kubernetes")
    first = written(status_body(snapshot(), seen(plan, "ready"), URL, T0))
    second = status_body(snapshot(first, generation=2), seen(plan, "ready"), URL, T1)
    assert second["observedGeneration"] == 2
    assert {condition["observedGeneration"] for condition in second["conditions"]} == {2}
    assert {condition["lastTransitionTime"] for condition in second["conditions"]} == {T0}


def test_a_repeated_fault_with_other_numbers_is_not_a_change(deployment: Make) -> None:
    plan = make_plan(deployment(), "kubernetes")

    def crashed(free: str) -> Observation:
        return seen(plan, "crashed", reason="ModelTooLarge", message=f"the weights take 9 GiB, {free} GiB are free")

    first = written(status_body(snapshot(), crashed("1.2"), URL, T0))
    assert status_body(snapshot(first), crashed("0.9"), URL, T1) == first
    after_edit = status_body(snapshot(first, generation=2), crashed("3.0"), URL, T1)
    assert "3.0 GiB are free" in after_edit["conditions"][-1]["message"]


def test_progress_is_a_change(deployment: Make) -> None:
    plan = make_plan(deployment(replicas=3), "kubernetes")
    first = written(status_body(snapshot(), seen(plan, "ready", "loading", "loading"), URL, T0))
    second = status_body(snapshot(first), seen(plan, "ready", "ready", "loading"), URL, T1)
    assert "2 of 3" in second["conditions"][-1]["message"]
    assert second["readyReplicas"] == 2


def test_ending_replicas_are_not_counted(deployment: Make) -> None:
    plan = make_plan(deployment(), "kubernetes")
    body = status_body(snapshot(), seen(plan, "draining", "gone", "ready"), URL, T0)
    assert (body["replicas"], body["readyReplicas"]) == (1, 1)


def test_a_change_of_replicas_is_stored_with_its_time(deployment: Make) -> None:
    one, three = (make_plan(deployment(replicas=n), "kubernetes") for n in (1, 3))
    first = written(status_body(snapshot(), seen(one, "ready"), URL, T0))
    assert "lastScaling" not in first
    second = written(status_body(snapshot(first, generation=2), seen(three, "ready"), URL, T1))
    assert (second["lastScaling"]["fromReplicas"], second["lastScaling"]["toReplicas"]) == (1, 3)
    third = status_body(snapshot(second, generation=2), seen(three, "ready", "ready"), URL, T2)
    assert third["lastScaling"]["time"] == T1


def test_an_unreadable_spec_keeps_the_known_status(deployment: Make) -> None:
    plan = make_plan(deployment(replicas=2), "kubernetes")
    first = written(status_body(snapshot(), seen(plan, "ready", "ready"), URL, T0))
    unread = replace(seen(plan, "ready", "ready"), plan=None)
    second = status_body(snapshot(first, generation=2), unread, URL, T1)
    assert second["plan"] == first["plan"]
    assert (second["desiredReplicas"], second["readyReplicas"], second["observedGeneration"]) == (2, 2, 2)


def test_a_status_of_another_version_is_replaced(deployment: Make) -> None:
    plan = make_plan(deployment(), "kubernetes")
    strange = {"conditions": [{"type": "Ready"}], "novelty": 1}
    assert status_body(snapshot(strange), seen(plan, "ready"), URL, T0)["readyReplicas"] == 1


def test_a_long_message_is_truncated(deployment: Make) -> None:
    plan = make_plan(deployment(), "kubernetes")
    body = status_body(snapshot(), seen(plan, "crashed", reason="X", message="y" * 100_000), URL, T0)
    assert max(len(condition["message"]) for condition in body["conditions"]) <= 4096


# Load


def test_load_changes_in_steps_and_not_too_often(deployment: Make) -> None:
    plan = make_plan(deployment(), "kubernetes")
    observation = seen(plan, "ready")
    first = written(status_body(snapshot(load=used(0.42, 7, 0)), observation, URL, T0))
    assert first["load"] == {
        "kvCacheUsagePercent": 40,
        "requestsRunning": 5,
        "requestsWaiting": 0,
        "lastUpdateTime": T0,
    }
    same_step = status_body(snapshot(first, load=used(0.41, 9, 0)), observation, URL, T2)
    assert same_step == first
    too_early = status_body(snapshot(first, load=used(0.9, 64, 30)), observation, URL, T1)
    assert too_early == first
    later = status_body(snapshot(first, load=used(0.9, 64, 30)), observation, URL, T2)
    assert (later["load"]["kvCacheUsagePercent"], later["load"]["requestsWaiting"]) == (90, 20)
    assert status_body(snapshot(written(later), load=None), observation, URL, T2) == later


def test_a_clock_that_was_set_back_does_not_stop_the_display() -> None:
    shown, measured = summarize(used(0.1, 1), T2), summarize(used(0.9, 50, 9), T0)
    assert next_load(shown, measured) == measured


@given(st.integers(-5, 10**9))
def test_a_rounded_count_is_a_step_and_never_more_than_the_count(count: int) -> None:
    assert coarse(count) in REQUEST_STEPS
    assert coarse(count) <= max(0, count)


@given(st.integers(0, 9), st.integers(-9, 27), st.integers(0, 10**6), st.integers(0, 10**6))
def test_any_reported_load_can_be_written(total: int, active: int, running: int, waiting: int) -> None:
    load = EngineLoad(
        num_kv_bytes_total=total,
        num_kv_bytes_active=active,
        num_requests_running=running,
        num_requests_waiting=waiting,
    )
    summary = summarize(load, T0)
    assert summary.kv_cache_usage_percent % 5 == 0


# Events


def status_of(observation: Observation, old: dict[str, Any] | None = None) -> dict[str, Any]:
    return written(status_body(snapshot(old), observation, URL, T0))


def test_a_fault_is_one_event_however_many_conditions_it_affects(deployment: Make) -> None:
    plan = make_plan(deployment(), "kubernetes")
    broken = status_of(seen(plan, "crashed", reason="ModelNotFound", message="correct spec.model.source"))
    assert events_between({}, broken) == [("Warning", "ModelNotFound", "correct spec.model.source")]
    assert events_between(broken, broken) == []


def test_becoming_ready_is_one_event_and_progress_is_none(deployment: Make) -> None:
    plan = make_plan(deployment(), "kubernetes")
    loading, ready = status_of(seen(plan, "loading")), status_of(seen(plan, "ready"))
    assert events_between({}, loading) == []
    assert [event[:2] for event in events_between(loading, ready)] == [("Normal", "Ready")]
    assert events_between(ready, ready) == []


def test_a_change_of_replicas_is_an_event(deployment: Make) -> None:
    before = status_of(seen(make_plan(deployment(replicas=1), "kubernetes"), "ready"))
    after = status_of(seen(make_plan(deployment(replicas=3), "kubernetes"), "ready"), before)
    assert [event[:3] for event in events_between(before, after)] == [
        ("Normal", "Scaled", "scaled from 1 to 3 replicas")
    ]


@pytest.mark.parametrize("stage", ["Planned", "Scheduled", "ModelLoaded"])
def test_a_fault_of_the_whole_deployment_sets_its_condition(deployment: Make, stage: Any) -> None:
    plan = make_plan(deployment(), "kubernetes")
    status = status_of(replace(seen(plan), fault=Fault(stage, "SomethingWrong", "do this")))
    broken = {condition["type"] for condition in status["conditions"] if condition["reason"] == "SomethingWrong"}
    assert broken == {stage, "Ready"}
    assert [event.reason for event in events_between({}, status)] == ["SomethingWrong"]


def test_the_phases_of_the_latest_start_are_shown_and_kept(deployment: Make) -> None:
    plan = make_plan(deployment(replicas=1), "kubernetes")
    start = LastStart("chat-1", T0, {"schedule": 1.0, "load": 3.25, "first_token": 0.5, "total": 9.0})
    body = status_body(snapshot(), replace(seen(plan, "ready"), last_start=start), URL, T0)
    shown = LLMDeploymentStatus.model_validate(written(body)).last_start
    assert shown is not None
    assert (shown.pod, shown.schedule_ms, shown.load_ms, shown.first_token_ms, shown.total_ms) == (
        "chat-1",
        1000,
        3250,
        500,
        9000,
    )
    assert body["lastStart"]["firstTokenMs"] == 500
    later = status_body(snapshot(written(body)), seen(plan, "ready"), URL, T1)
    assert later["lastStart"] == body["lastStart"], "a leader without a measurement must keep it"
