"""Rolling updates under load (of the model's name, of an engine flag, of the image) fail no request."""

from __future__ import annotations

from typing import Any

import pytest
from support.clusters import OneNode, program
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.load import long_answers, running_load
from support.objects import llmdeployment
from support.release import Release
from support.waiting import until

ALIAS = "chat"
"""The alias that clients use, so that the model's own name may change."""


@pytest.fixture
def assistant(release: Release, space: Kubectl) -> Deployed:
    deployed = deploy(space, llmdeployment("assistant", replicas=2, model={"name": "assistant-1", "aliases": [ALIAS]}))
    deployed.wait_ready(2)
    return deployed


@pytest.mark.smoke
def test_a_new_model_name_interrupts_no_stream(release: Release, assistant: Deployed) -> None:
    """Replicas stay, and clients may send the former name for ten minutes."""
    pods = {pod["metadata"]["uid"] for pod in assistant.pods()}
    with running_load(release.service(ALIAS)) as load:
        assistant.patch(model={"name": "assistant-2"})
        until("gateways serve the new name", lambda: "assistant-2" in release.service(ALIAS).models())
        assert release.service("assistant-1").ask(), "the former name is refused"
        assistant.wait_settled()
        load.wait_for(10)
        names = release.service(ALIAS).models()
    load.report().assert_all_complete(at_least=20)
    assert {"assistant-1", "assistant-2", ALIAS} == set(names)
    assert {pod["metadata"]["uid"] for pod in assistant.pods()} == pods


@pytest.mark.smoke
def test_a_new_engine_flag_replaces_every_pod_and_interrupts_no_stream(release: Release, assistant: Deployed) -> None:
    _roll(release, assistant, {"engine": {"maxNumSeqs": 6}})


def test_a_new_image_replaces_every_pod_and_interrupts_no_stream(
    one_node: OneNode, release: Release, assistant: Deployed
) -> None:
    old = f"docker.io/pagemill/engine-cpu:{release.image_tag}"
    image = f"{old}-next"
    program("derive", old, image)
    _roll(release, assistant, {"engine": {"image": image}})
    assert {pod["spec"]["containers"][0]["image"] for pod in assistant.pods()} == {image}


def test_three_changes_in_a_row_end_with_the_last_one(release: Release, assistant: Deployed, space: Kubectl) -> None:
    with running_load(release.service(ALIAS)) as load:
        for max_num_seqs in (5, 6, 7):
            assistant.patch(engine={"maxNumSeqs": max_num_seqs})
        assistant.wait_settled()
        load.wait_for(10)
    load.report().assert_all_complete(at_least=20)
    until(
        "the settings of earlier changes are deleted",
        lambda: len(space.items("configmaps", "--selector", assistant.selector)) <= 2,
        timeout_s=60,
    )


def _roll(release: Release, assistant: Deployed, change: dict[str, Any]) -> None:
    old = assistant.pods()
    service = release.service(ALIAS)
    with long_answers(service) as long, running_load(service) as load:
        assistant.patch(**change)
        assistant.wait_rolled_out(old)
        load.wait_for(10)
    load.report().assert_all_complete(at_least=20)
    long.report().assert_all_complete(at_least=2)
    assert {pod["metadata"]["uid"] for pod in old}.isdisjoint(pod["metadata"]["uid"] for pod in assistant.pods())


def test_the_only_replica_of_a_full_node_is_replaced_in_place_and_requests_wait(
    one_node: OneNode, release: Release, space: Kubectl
) -> None:
    (node,) = one_node.kubectl.items("nodes")
    # More than half of the node, so that a second pod of it has no room.
    wide = {"name": "engine", "resources": {"requests": {"cpu": f"{int(node['status']['allocatable']['cpu']) * 600}m"}}}
    resources = {"gpus": 0, "cpu": int(node["status"]["allocatable"]["cpu"]), "memory": "1536Mi"}
    template = {"spec": {"containers": [wide]}}
    chat = deploy(space, llmdeployment("chat", resources=resources, template=template))
    chat.wait_ready(1)
    old = chat.pods()
    with running_load(release.service("chat"), workers=2) as load:
        chat.patch(engine={"maxNumSeqs": 6})
        chat.wait_rolled_out(old)
        load.wait_for(5)
    load.report().assert_all_complete(at_least=5)
