"""Replicas of two pods: a LeaderWorkerSet's real controller makes and restarts them, and they serve as one endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.clusters import OneNode, program
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.load import PROMPTS, running_load
from support.objects import Document, llmdeployment
from support.processes import kill_pod
from support.release import Release
from support.waiting import until

WORKERS = "app.kubernetes.io/component=worker"
MAX_TOKENS = 48


@pytest.fixture(scope="module")
def controller() -> Iterator[None]:
    program("groups", "install")
    yield
    program("groups", "remove")


def test_two_pods_answer_as_one_and_a_killed_worker_cuts_no_stream(
    one_node: OneNode, release: Release, controller: None, space: Kubectl
) -> None:
    """The texts equal those of an engine of one process."""
    single = deploy(space, llmdeployment("single"))
    single.wait_ready(1)
    service = release.service("single")
    golden = {prompt: service.ask(prompt, MAX_TOKENS) for prompt in PROMPTS}
    single.delete()
    chat = deploy(space, _document(replicas=2))
    chat.wait_ready(2)
    assert len(chat.pods()) == 2
    assert len(_workers(chat)) == 2
    with running_load(release.service("chat"), workers=4, max_tokens=MAX_TOKENS, golden=golden) as load:
        load.wait_for(4)
        worker = _workers(chat)[0]
        kill_pod(space.json("get", f"pod/{worker}"), "pagemill_engine")
        space.wait(f"pod/{worker}", "delete", 120)
        load.wait_for(4)
        until("the group is complete again", lambda: len(_workers(chat)) == 2, timeout_s=120)
        chat.wait_ready(2)
        load.wait_for(4)
    load.report().assert_all_complete(at_least=12)


def test_groups_are_added_and_removed_under_load(
    one_node: OneNode, release: Release, controller: None, space: Kubectl
) -> None:
    chat = deploy(space, _document(replicas=1))
    chat.wait_ready(1)
    with running_load(release.service("chat"), workers=2, max_tokens=MAX_TOKENS) as load:
        chat.scale(2)
        chat.wait_ready(2)
        assert len(_workers(chat)) == 2
        load.wait_for(4)
        chat.scale(1)
        until("one group is left", lambda: (len(chat.pods()), len(_workers(chat))) == (1, 1), timeout_s=120)
        chat.wait_ready(1)
        load.wait_for(4)
    load.report().assert_all_complete(at_least=8)


def _document(replicas: int) -> Document:
    return llmdeployment("chat", replicas=replicas, engine={"tensorParallel": 2, "podsPerReplica": 2})


def _workers(chat: Deployed) -> list[str]:
    pods = chat.kubectl.items("pods", "--selector", f"{chat.selector},{WORKERS}")
    return sorted(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"])
