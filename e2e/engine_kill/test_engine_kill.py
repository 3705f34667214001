"""Engines that die without a word, under load: nobody gets a silent cut."""

from __future__ import annotations

import itertools

import pytest
from support.clusters import OneNode
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.processes import kill_pod
from support.release import Release
from support.waiting import until

MOST_KILLS = 6


@pytest.mark.smoke
def test_killed_engines_cut_no_stream_silently_and_fail_no_other_request(
    one_node: OneNode, release: Release, space: Kubectl
) -> None:
    """Until a stream was hit: whole answers are computed again elsewhere, begun streams end with an error event."""
    chat = deploy(space, llmdeployment("chat", replicas=2))
    chat.wait_ready(2)
    with running_load(release.service("chat"), workers=4, max_tokens=96) as load:
        for number in itertools.count(1):
            _kill_one(chat, number % 2)
            load.wait_for(8)
            chat.wait_ready(2)
            if load.report().with_outcome("told") or number == MOST_KILLS:
                break
    report = load.report()
    assert report.with_outcome("told", streamed=True), f"no kill hit a stream: {report.summary()}"
    assert report.with_outcome("cut", "wrong", "refused", "unreachable") == [], report.summary()
    assert report.with_outcome("told", streamed=False) == []
    assert len(report.with_outcome("told")) <= 4 * MOST_KILLS
    assert report.complete >= 20


def _kill_one(chat: Deployed, index: int) -> None:
    """One engine after the other, so that kubelet's pause before a restart stays short."""
    name = sorted(pod["metadata"]["name"] for pod in chat.pods())[index]
    restarts = _restarts(chat, name)
    kill_pod(chat.kubectl.json("get", f"pod/{name}"), "pagemill_engine")
    until("kubelet restarted the engine", lambda: _restarts(chat, name) > restarts, timeout_s=60)
    chat.kubectl.wait(f"pod/{name}", "condition=Ready")


def _restarts(chat: Deployed, name: str) -> int:
    pod = chat.kubectl.json("get", f"pod/{name}")
    count: int = pod["status"]["containerStatuses"][0]["restartCount"]
    return count
