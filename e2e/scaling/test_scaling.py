"""`kubectl scale` under load: new replicas join, leaving ones finish what they began."""

from __future__ import annotations

import pytest
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.release import Release
from support.waiting import until


@pytest.mark.smoke
def test_scaling_from_1_to_3_to_1_loses_no_request(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    with running_load(release.service("chat")) as load:
        chat.scale(3)
        chat.wait_ready(3)
        load.wait_for(15)
        chat.scale(1)
        chat.wait_ready(1)
        until("one pod is left", lambda: len(space.items("pods", "--selector", chat.pod_selector)) == 1, timeout_s=90)
        load.wait_for(5)
    load.report().assert_all_complete(at_least=30)
    assert chat.status()["replicas"] == 1


def test_scaling_to_nothing_is_ready_with_no_replica(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat", replicas=0))
    chat.wait_reason("Ready", "ScaledToZero")
    assert space.items("pods") == []
    chat.scale(1)
    chat.wait_ready(1)
    assert release.service("chat").ask() != ""
