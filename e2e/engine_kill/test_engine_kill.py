"""Killing engines under load fails no request."""

from __future__ import annotations

import pytest
from support.clusters import OneNode
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.processes import kill_pod, restart_count
from support.release import Release
from support.waiting import until

NUM_KILLS = 4


@pytest.mark.smoke
def test_killed_engines_fail_no_request_and_cut_no_stream(one_node: OneNode, release: Release, space: Kubectl) -> None:
    """Another engine continues the answers of a killed engine: every text equals the golden one."""
    chat = deploy(space, llmdeployment("chat", replicas=2))
    chat.wait_ready(2)
    with running_load(release.service("chat"), workers=4, max_tokens=96) as load:
        for number in range(NUM_KILLS):
            _kill_one(chat, number % 2)
            load.wait_for(8)
            chat.wait_ready(2)
    load.report().assert_all_complete(at_least=20)


def _kill_one(chat: Deployed, index: int) -> None:
    """Kill the engines alternately, so that the kubelet's back-off before a restart stays short."""
    name = sorted(pod["metadata"]["name"] for pod in chat.pods())[index]
    restarts = _restarts(chat, name)
    kill_pod(chat.kubectl.json("get", f"pod/{name}"), "pagemill_engine")
    until("kubelet restarted the engine", lambda: _restarts(chat, name) > restarts, timeout_s=60)
    chat.kubectl.wait(f"pod/{name}", "condition=Ready")


def _restarts(chat: Deployed, name: str) -> int:
    return restart_count(chat.kubectl.json("get", f"pod/{name}"))
