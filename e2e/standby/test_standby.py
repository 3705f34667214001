"""`autoscaling.warm`: at zero replicas one engine sleeps with its weights, and the next request wakes that pod."""

from __future__ import annotations

import time

import pytest
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.measures import Measures
from support.objects import llmdeployment
from support.processes import kill_pod
from support.release import Release
from support.waiting import until

STARTED_S = 300.0
ASLEEP_S = 240.0
"""Time limit for the engine's start, `scaleToZeroAfter`, and the completion of its Deployment."""

pytestmark = pytest.mark.timeout(1200)


def test_the_last_replica_sleeps_and_the_next_request_wakes_it(
    release: Release, space: Kubectl, measures: Measures
) -> None:
    autoscaling = {"minReplicas": 0, "maxReplicas": 1, "warm": 1, "scaleToZeroAfter": "10s"}
    chat = deploy(space, llmdeployment("chat", autoscaling=autoscaling))
    chat.wait_ready(1, STARTED_S)
    service = release.service("chat")
    assert "Paris" in service.ask("What is the capital of France?")
    (pod,) = chat.pods()
    _wait_asleep(chat)
    chat.wait_reason("Ready", "ScaledToZero")
    assert _identity(chat) == (pod["metadata"]["uid"], 0), "the sleeping pod was replaced or restarted"

    asked_s = time.monotonic()
    assert "Paris" in service.ask("What is the capital of France?")
    measures.record("a standby replica on the cluster", woken_and_answered_s=time.monotonic() - asked_s)
    assert _identity(chat) == (pod["metadata"]["uid"], 0)

    # A new leader continues with the present state.
    kill_pod(release.leader(), "pagemill_operator")
    _wait_asleep(chat)
    assert "Paris" in service.ask("What is the capital of France?")
    assert _identity(chat) == (pod["metadata"]["uid"], 0)


def _wait_asleep(chat: Deployed) -> None:
    until("the replica sleeps", lambda: chat.status().get("standbyReplicas") == 1, timeout_s=ASLEEP_S)


def _identity(chat: Deployed) -> tuple[str, int]:
    """Return uid and restarts of the only pod."""
    (pod,) = chat.pods()
    restarts: int = pod["status"]["containerStatuses"][0]["restartCount"]
    return pod["metadata"]["uid"], restarts
