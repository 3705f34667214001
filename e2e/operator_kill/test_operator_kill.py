"""If the operator is killed during its work, the next one finishes it."""

from __future__ import annotations

from support.clusters import OneNode
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.processes import kill_pod
from support.release import Release
from support.waiting import until


def test_killing_every_operator_in_the_middle_of_a_rollout_changes_nothing_for_clients(
    one_node: OneNode, release: Release, space: Kubectl
) -> None:
    chat = deploy(space, llmdeployment("chat", replicas=2))
    chat.wait_ready(2)
    old = chat.pods()
    settings = {each["metadata"]["name"] for each in space.items("configmaps", "--selector", chat.selector)}
    with running_load(release.service("chat")) as load:
        chat.patch(engine={"maxNumSeqs": 6})
        until(
            "the operator has created the new settings",
            lambda: (
                {each["metadata"]["name"] for each in space.items("configmaps", "--selector", chat.selector)} - settings
            ),
        )
        for pod in release.pods("operator"):
            kill_pod(pod, "pagemill_operator")
        chat.wait_rolled_out(old)
        load.wait_for(5)
    load.report().assert_all_complete(at_least=20)
    assert chat.condition("Ready")["status"] == "True"
