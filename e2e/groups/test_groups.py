"""Replicas of two pods: a LeaderWorkerSet's real controller makes and restarts them, and they serve as one endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.clusters import OneNode, program
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.processes import kill_pod
from support.release import Release
from support.waiting import until

WORKERS = "app.kubernetes.io/component=worker"


@pytest.fixture(scope="module")
def controller() -> Iterator[None]:
    program("groups", "install")
    yield
    program("groups", "remove")


def test_two_pods_answer_as_one_and_a_killed_worker_cuts_no_stream(
    one_node: OneNode, release: Release, controller: None, space: Kubectl
) -> None:
    """The texts equal the golden ones, which one process has generated."""
    chat = deploy(space, llmdeployment("chat", replicas=2, engine={"tensorParallel": 2, "podsPerReplica": 2}))
    chat.wait_ready(2)
    assert len(chat.pods()) == 2
    assert len(_workers(chat)) == 2
    with running_load(release.service("chat"), workers=4, max_tokens=48) as load:
        load.wait_for(4)
        worker = _workers(chat)[0]
        kill_pod(space.json("get", f"pod/{worker}"), "pagemill_engine")
        space.wait(f"pod/{worker}", "delete", 120)
        load.wait_for(4)
        until("the group is complete again", lambda: len(_workers(chat)) == 2, timeout_s=120)
        chat.wait_ready(2)
        load.wait_for(4)
    load.report().assert_all_complete(at_least=12)


def _workers(chat: Deployed) -> list[str]:
    pods = chat.kubectl.items("pods", "--selector", f"{chat.selector},{WORKERS}")
    return sorted(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"])
