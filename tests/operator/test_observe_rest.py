"""Sleeping pods in the operator's observation: by their engine's report or their order, and never as a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from observed_world import READY, World

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.kubernetes.observe import observe, status_body
from pagemill_operator.status.conditions import find_conditions

Make = Callable[..., LLMDeployment]
UNREADY = ({"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:01:00Z"},)
RUNNING = {"started": True, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
RESTARTED = {"started": True, "state": {"running": {"startedAt": "2026-01-01T00:05:00Z"}}}


def phase(
    deployment: Make, *, received: bool, reported: str | None, ready: bool, container: dict[str, Any] = RUNNING
) -> str:
    world = World(deployment()).apply()
    world.pod({**container, "ready": ready}, conditions=READY if ready else UNREADY, uid="u")
    pod = world.pods[0]
    if reported is not None:
        pod["metadata"]["annotations"] = {**pod["metadata"]["annotations"], "pagemill.dev/rest": reported}
    snapshot = replace(world.snapshot, asleep=frozenset({"u"} if received else set()))
    (replica,) = observe(snapshot, world.plan).replicas
    return f"{replica.phase} {replica.reason}".strip()


@pytest.mark.parametrize(
    ("received", "reported", "ready", "expected"),
    [
        (True, "asleep", False, "asleep"),
        (True, None, False, "asleep"),
        (True, "asleep", True, "asleep"),
        (False, "asleep", False, "asleep"),
        (False, "waking", False, "waking"),
        (True, "waking", False, "asleep"),
        (False, "asleep", True, "ready"),
        (False, None, True, "ready"),
        (False, None, False, "loading ProbeFailing"),
        (False, "nonsense", False, "loading ProbeFailing"),
    ],
)
def test_the_phase_of_a_pod(deployment: Make, received: bool, reported: str | None, ready: bool, expected: str) -> None:
    assert phase(deployment, received=received, reported=reported, ready=ready) == expected


def test_a_restarted_container_is_loading_whatever_its_pods_order(deployment: Make) -> None:
    assert phase(deployment, received=False, reported="asleep", ready=False, container=RESTARTED) == "loading"


def test_at_zero_with_a_standby_the_status_describes_the_effect_of_a_request(deployment: Make) -> None:
    world = World(deployment(replicas=0, autoscaling={"minReplicas": 0, "maxReplicas": 2, "warm": 1})).apply()
    world.pod({**RUNNING, "ready": False}, conditions=UNREADY, uid="u")
    snapshot = replace(world.snapshot, asleep=frozenset({"u"}))
    seen = observe(snapshot, world.plan)
    found = {finding.type: finding for finding in find_conditions(seen)}
    assert found["Ready"].message == "there are no requests; the next one wakes a replica"
    assert (found["ModelLoaded"].status, found["Scheduled"].status) == ("True", "True")
    assert not any(finding.is_fault for finding in found.values())
    body = status_body(snapshot, seen, "", "2026-01-01T00:00:00Z")
    assert (body["replicas"], body["desiredReplicas"], body["readyReplicas"], body["standbyReplicas"]) == (1, 0, 0, 1)


def test_one_serving_and_one_sleeping_replica_are_ready(deployment: Make) -> None:
    world = World(deployment(autoscaling={"maxReplicas": 2, "warm": 1})).apply()
    world.pod({**RUNNING, "ready": True}, conditions=READY, uid="a")
    world.pod({**RUNNING, "ready": False}, conditions=UNREADY, uid="b")
    seen = observe(replace(world.snapshot, asleep=frozenset({"b"})), world.plan)
    found = {finding.type: finding for finding in find_conditions(seen)}
    assert (found["Ready"].status, found["Ready"].message) == ("True", "1 of 1 replicas are ready")
