"""Without the API server for a minute, all requests are answered, also by a gateway that restarts in that minute."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager

import pytest
from support.clusters import OneNode
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.processes import kill_pod, restart_count
from support.release import Release
from support.waiting import until

from pagemill_protocol.engine_ports import engine_url

OUTAGE_S = 60.0
RECONCILED_S = 10.0


@pytest.mark.smoke
def test_a_minute_without_the_api_server_fails_no_request(one_node: OneNode, release: Release, space: Kubectl) -> None:
    _survive(one_node.without("kube-apiserver"), release, space)


def test_an_api_server_that_is_suspended_for_a_minute_fails_no_request(
    one_node: OneNode, release: Release, space: Kubectl
) -> None:
    """A suspended API server keeps its connections open and answers nothing."""
    _survive(one_node.silent("kube-apiserver"), release, space)


def _survive(outage: AbstractContextManager[None], release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat", replicas=2))
    chat.wait_ready(2)
    steady, restarted = release.pods("gateway")
    restarts = _restarts(release)
    with running_load(release.gateway_pod(steady, "chat")) as load:
        with outage:
            gone_s = time.monotonic()
            kill_pod(restarted, "pagemill_gateway")
            until("the restarted gateway is ready", lambda: _is_ready(restarted["status"]["podIP"]), timeout_s=45)
            with running_load(release.gateway_pod(restarted, "chat"), workers=1) as second_load:
                until("the minute is over", lambda: time.monotonic() > gone_s + OUTAGE_S, timeout_s=OUTAGE_S + 5)
        chat.scale(1)
        until("the change is reconciled", lambda: _engine_replicas(space) == 1, timeout_s=RECONCILED_S)
        chat.wait_ready(1)
        load.wait_for(5)
    load.report().assert_all_complete(at_least=30)
    second_load.report().assert_all_complete(at_least=5)
    assert _restarts(release) == restarts, "an operator exited because the API server was away"


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{engine_url(address, 8080)}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _engine_replicas(space: Kubectl) -> int:
    replicas: int = space.json("get", "deployment/chat-engine")["spec"]["replicas"]
    return replicas


def _restarts(release: Release) -> dict[str, int]:
    return {pod["metadata"]["name"]: restart_count(pod) for pod in release.pods("operator")}
