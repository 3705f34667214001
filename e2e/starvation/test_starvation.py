"""Scale to zero with requests that come more rarely than the idle time: each buys a replica, which serves it."""

from __future__ import annotations

import time

import pytest
from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import llmdeployment
from support.release import Release
from support.waiting import until

IDLE_S, APART_S, START_S = 20, 75, 45
pytestmark = pytest.mark.timeout(900)


def test_each_request_of_a_sparse_client_is_answered_and_its_replica_serves_one_idle_time(
    release: Release, space: Kubectl
) -> None:
    """A replica needs longer to start than the idle time."""
    slow = {"spec": {"initContainers": [_sleeper(release.image_tag)]}}
    scaling = {"minReplicas": 0, "maxReplicas": 1, "scaleToZeroAfter": f"{IDLE_S}s"}
    routing = {"queue": {"timeout": "4m"}}
    chat = deploy(space, llmdeployment("chat", template=slow, autoscaling=scaling, routing=routing))
    chat.wait_ready(1)
    began_s = time.monotonic()
    for number in range(4):
        until(
            "it is time for the next request",
            lambda at=number: time.monotonic() >= began_s + at * APART_S,
            timeout_s=200,
        )
        assert release.service("chat").ask(max_tokens=4)
        answered_s = time.monotonic()
        until("its replica is removed", lambda: not chat.pods(), timeout_s=120, interval_s=0.2)
        assert time.monotonic() - answered_s >= IDLE_S - 1


def _sleeper(image_tag: str) -> dict[str, object]:
    """Return an init container that delays the start of each engine."""
    return {
        "name": "slow-start",
        "image": f"docker.io/pagemill/engine-cpu:{image_tag}",
        "command": ["python", "-c", f"import time; time.sleep({START_S - 10})"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
