"""`kubectl scale` under load: new replicas join, and removed replicas finish their requests."""

from __future__ import annotations

import pytest
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import long_answers, running_load
from support.objects import llmdeployment
from support.release import Release
from support.waiting import until


@pytest.mark.smoke
def test_scaling_from_1_to_3_to_1_loses_no_request(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    service = release.service("chat")
    with long_answers(service) as long, running_load(service) as load:
        chat.scale(3)
        chat.wait_ready(3)
        load.wait_for(15)
        chat.scale(1)
        chat.wait_ready(1)
        until("one pod is left", lambda: len(space.items("pods", "--selector", chat.pod_selector)) == 1, timeout_s=90)
        load.wait_for(5)
    load.report().assert_all_complete(at_least=30)
    long.report().assert_all_complete(at_least=2)
    assert chat.status()["replicas"] == 1


def test_scaling_to_nothing_is_ready_with_no_replica(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat", replicas=0))
    chat.wait_reason("Ready", "ScaledToZero")
    assert space.items("pods") == []
    chat.scale(1)
    chat.wait_ready(1)
    assert release.service("chat").ask() != ""


def test_the_list_shows_the_load_of_the_engines(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat", engine={"maxNumSeqs": 2}))
    chat.wait_ready(1)
    with running_load(release.service("chat"), workers=6, max_tokens=100):
        until("KV% and QUEUE show the load", lambda: min(_shown_load(space)) > 0, timeout_s=120, interval_s=1)
    until(
        "KV% and QUEUE show that the load has ended", lambda: _shown_load(space) == (0, 0), timeout_s=120, interval_s=1
    )


def _shown_load(space: Kubectl) -> tuple[int, int]:
    """Return KV% and QUEUE of the only row, with 0 for an empty column."""
    header, row = space.ok("get", "llmd").splitlines()
    kv, queue = (row[header.index(name) :].split(" ")[0] for name in ("KV%", "QUEUE"))
    return int(kv or 0), int(queue or 0)
