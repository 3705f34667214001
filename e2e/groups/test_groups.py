"""Replicas of two pods: a LeaderWorkerSet's real controller makes and restarts them, and they serve as one endpoint."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import hubs
from support.clusters import OneNode, program
from support.deployments import deploy
from support.dropping import dropping
from support.groups import leaders, of_two_pods, wait_replaced, workers
from support.kubectl import Kubectl
from support.load import PROMPTS, running_load
from support.processes import kill_pod
from support.release import Release
from support.waiting import until

MAX_TOKENS = 48
Golden = dict[str, str]

pytestmark = pytest.mark.timeout(1200)


def test_two_pods_answer_as_one_and_a_killed_worker_cuts_no_stream(
    one_node: OneNode, release: Release, controller: None, space: Kubectl, golden: Callable[[int], Golden]
) -> None:
    """The texts equal those of an engine of one process."""
    texts = golden(MAX_TOKENS)
    chat = deploy(space, of_two_pods(replicas=2))
    chat.wait_ready(2)
    assert len(chat.pods()) == 2
    assert len(workers(chat)) == 2
    with running_load(release.service("chat"), workers=4, max_tokens=MAX_TOKENS, golden=texts) as load:
        load.wait_for(4)
        worker = workers(chat)[0]
        kill_pod(worker, "pagemill_engine")
        wait_replaced(chat, 2, worker)
        load.wait_for(4)
    load.report().assert_all_complete(at_least=12)


def test_a_killed_first_pod_a_cut_network_and_an_eviction_cut_no_stream(
    one_node: OneNode, release: Release, controller: None, space: Kubectl, golden: Callable[[int], Golden]
) -> None:
    texts = golden(MAX_TOKENS)
    chat = deploy(space, of_two_pods(replicas=2))
    chat.wait_ready(2)
    with running_load(release.service("chat"), workers=4, max_tokens=MAX_TOKENS, golden=texts) as load:
        load.wait_for(4)
        first, worker = leaders(chat)[0], workers(chat)[0]
        kill_pod(first, "pagemill_engine")
        wait_replaced(chat, 2, first, worker)
        load.wait_for(4)
        first, worker = leaders(chat)[1], workers(chat)[1]
        address = first["status"]["podIP"]
        with dropping([worker], "pagemill_engine", sent=f"ip daddr {address}", received=f"ip saddr {address}"):
            wait_replaced(chat, 2, first, worker)
        load.wait_for(4)
        first, worker = leaders(chat)[0], workers(chat)[0]
        assert space.evict(worker["metadata"]["name"]).returncode == 0
        wait_replaced(chat, 2, first, worker)
        load.wait_for(4)
    load.report().assert_all_complete(at_least=20)


def test_stages_on_two_pods_are_replaced_while_both_controllers_restart_and_come_back_from_zero(
    one_node: OneNode, release: Release, controller: None, space: Kubectl, golden: Callable[[int], Golden]
) -> None:
    texts = golden(MAX_TOKENS)
    chat = deploy(space, of_two_pods(replicas=2, pipelineParallel=2))
    chat.wait_ready(2)
    old = [*leaders(chat), *workers(chat)]
    with running_load(release.service("chat"), workers=2, max_tokens=MAX_TOKENS, golden=texts) as load:
        load.wait_for(4)
        chat.patch(engine={"maxNumSeqs": 6})
        until("the first group is being replaced", lambda: len(chat.pods()) < 2, timeout_s=60)
        program("groups", "stop")
        for pod in release.pods("operator"):
            kill_pod(pod, "pagemill_operator")
        load.wait_for(2)
        program("groups", "start")
        wait_replaced(chat, 2, *old)
        load.wait_for(4)
    load.report().assert_all_complete(at_least=12)
    chat.patch(autoscaling={"minReplicas": 0, "maxReplicas": 1, "scaleToZeroAfter": "5s"})
    until("no pod is left", lambda: (leaders(chat), workers(chat)) == ([], []), timeout_s=120)
    assert release.service("chat").ask(PROMPTS[0], MAX_TOKENS) == texts[PROMPTS[0]]
    assert len(workers(chat)) == 1


def test_groups_are_added_and_removed_under_load(
    one_node: OneNode, release: Release, controller: None, space: Kubectl
) -> None:
    chat = deploy(space, of_two_pods(replicas=1))
    chat.wait_ready(1)
    with running_load(release.service("chat"), workers=2, max_tokens=MAX_TOKENS) as load:
        chat.scale(2)
        chat.wait_ready(2)
        assert len(workers(chat)) == 2
        load.wait_for(4)
        chat.scale(1)
        until("one group is left", lambda: (len(chat.pods()), len(workers(chat))) == (1, 1), timeout_s=120)
        chat.wait_ready(1)
        load.wait_for(4)
    load.report().assert_all_complete(at_least=8)


def test_all_pods_of_groups_read_one_cache(
    one_node: OneNode, release: Release, controller: None, space: Kubectl, golden: Callable[[int], Golden]
) -> None:
    """The model is loaded once; its source is gone when the second group starts."""
    cached, grouped = hubs.cached("chat", hubs.start(space, release.image_tag)), of_two_pods(replicas=1)
    grouped["spec"]["model"] = cached["spec"]["model"]
    grouped["spec"]["engine"] |= cached["spec"]["engine"]
    chat = deploy(space, grouped)
    chat.wait_ready(1)
    space.delete("pod/hub")
    chat.scale(2)
    chat.wait_ready(2)
    assert len(space.items("jobs", "--selector", chat.selector)) == 1
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for pod in [*leaders(chat), *workers(chat)]
        for volume in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert len(claims) == 4
    assert len(set(claims)) == 1
    texts = golden(MAX_TOKENS)
    assert release.service("chat").ask(PROMPTS[0], MAX_TOKENS) == texts[PROMPTS[0]]
