"""Autoscaling under load: from 1 to 3 replicas, no change while the load is unknown, down to 0, and up again.

The leading operator is killed while replicas start, and the load stream is cut off while the load falls. No request
fails.
"""

from __future__ import annotations

import time

import pytest
from support.audit import AuditLog
from support.clusters import OneNode
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.load_stream import CONTROL_PORT, cut
from support.measures import Measures
from support.metrics import total
from support.objects import Document, llmdeployment
from support.processes import kill_pod
from support.release import Release
from support.waiting import until

MOST = 3
HEAVY = 8
"""Number of concurrent requests: more than three engines can run, so that the waiting requests require more than two.
"""
WINDOW_S = 10
IDLE_S = 15
HELD_S = 3.0 * WINDOW_S
"""Seconds without gateway reports in which the number of replicas must not change: with reports, it would fall to 1."""
QUEUED = "pagemill_gateway_queue_requests"
STARTED_S = 300.0
"""Time limit for the start of three engines on two cores that also serve requests."""
SETTLED_S = 240.0
"""Time limit for scaling down: no replica is removed for a minute after a burst; the windows and the drains follow."""

pytestmark = pytest.mark.timeout(1800)


def scaled() -> Document:
    return llmdeployment(
        "chat",
        engine={"maxNumSeqs": 2},
        routing={"queue": {"timeout": "4m"}},
        autoscaling={
            "minReplicas": 0,
            "maxReplicas": MOST,
            "targets": {"queueDepth": 1},
            "scaleToZeroAfter": f"{IDLE_S}s",
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": WINDOW_S}},
        },
    )


def test_replicas_follow_the_load_to_three_and_to_zero_and_back(
    one_node: OneNode, release: Release, space: Kubectl, audit: AuditLog, measures: Measures
) -> None:
    chat, service = deploy(space, scaled()), release.service("chat")
    chat.wait_ready(1, STARTED_S)
    chat.wait_reason("ScalingActive", "ScalingActive")
    start = (
        until("the status shows the phases of the start", lambda: chat.status().get("lastStart"), timeout_s=90) or {}
    )
    assert min(start["loadMs"], start["warmMs"], start["firstTokenMs"]) > 0, start
    measures.record("cold start by phase", **{name: value for name, value in start.items() if name.endswith("Ms")})

    with running_load(service, workers=HEAVY) as heavy:
        began_s = time.monotonic()
        until("requests wait in the gateways", lambda: _queued(release) > 0, timeout_s=60)
        until("three replicas are ordered", lambda: _desired(chat) == _ordered(chat) == MOST, timeout_s=60)
        ordered_s = time.monotonic()
        assert "requests wait" in chat.status()["lastScaling"]["reason"], chat.status()
        kill_pod(release.leader(), "pagemill_operator")
        chat.wait_ready(MOST, STARTED_S)
        ready_s = time.monotonic()
        chat.wait_reason("ScalingActive", "ScalingActive")
        until("the status shows the load", lambda: _shown(chat, "requestsRunning") > 0, timeout_s=90)
        heavy.wait_for(HEAVY)
        assert _ordered(chat) == MOST, "the new leader did not keep the number of replicas"

        with cut(release.pods("operator")):
            held = chat.wait_reason("ScalingActive", "SignalsMissing")
            assert held["status"] == "False", held
            assert "gateways report" in held["message"], held
            heavy.stopping.set()
            cut_s = time.monotonic()
            until("the windows are over", lambda: time.monotonic() > cut_s + HELD_S, timeout_s=HELD_S + 5)
            assert _ordered(chat) == MOST, "an unknown load was treated as no load"
            assert chat.condition("ScalingActive")["reason"] == "SignalsMissing", chat.status()
            assert len(chat.pods()) == MOST
    heavy.report().assert_all_complete(at_least=4 * HEAVY)

    with running_load(service, workers=1, golden=heavy.golden) as light:
        chat.wait_reason("ScalingActive", "ScalingActive")
        until("one replica is left", lambda: _ordered(chat) == 1 and _num_pods(chat) == 1, timeout_s=SETTLED_S)
        light.wait_for(5)
        assert _ordered(chat) == 1, "one request at a time did not keep one replica"
    light.report().assert_all_complete(at_least=10)
    noted = [call for call in audit.writes(user="pagemill-operator") if call.resource == "pods"]
    assert 0 < len(noted) <= 2 * MOST, "the operator must write deletion costs on pods, at most two for each"

    chat.wait_reason("Ready", "ScaledToZero", SETTLED_S)
    until("no pod is left", lambda: _num_pods(chat) == 0, timeout_s=90)
    asked_s = time.monotonic()
    with running_load(service, workers=2, max_requests=4, warm_up=1, golden=heavy.golden) as waking:
        first_s = time.monotonic() - asked_s
        waking.wait_for(3, timeout_s=STARTED_S)
    waking.report().assert_all_complete(at_least=4)
    until("an event reports the start", lambda: _was_reported(chat, "scaled from 0 to "), timeout_s=60)
    measures.record(
        f"1 to {MOST} replicas under load, to 0 and awake",
        ordered_after_s=ordered_s - began_s,
        ready_after_s=ready_s - began_s,
        first_answer_from_zero_s=first_s,
        requests=heavy.report().complete + light.report().complete + waking.report().complete,
        failed=0,
    )


def _ordered(chat: Deployed) -> int:
    replicas: int = chat.kubectl.json("get", f"deployment/{chat.name}-engine")["spec"]["replicas"]
    return replicas


def _desired(chat: Deployed) -> int:
    replicas: int = chat.status().get("desiredReplicas", 0)
    return replicas


def _num_pods(chat: Deployed) -> int:
    """Return the number of pods, including pods that are being deleted."""
    return len(chat.kubectl.items("pods", "--selector", chat.pod_selector))


def _queued(release: Release) -> float:
    return sum(total(pod, CONTROL_PORT, QUEUED, model="chat") for pod in release.pods("gateway"))


def _shown(chat: Deployed, field: str) -> int:
    count: int = chat.status().get("load", {}).get(field, 0)
    return count


def _was_reported(chat: Deployed, beginning: str) -> bool:
    selector = f"involvedObject.kind=LLMDeployment,involvedObject.name={chat.name},reason=Scaled"
    events = chat.kubectl.items("events", f"--field-selector={selector}")
    return any(event["message"].startswith(beginning) for event in events)
