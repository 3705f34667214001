"""Engines that request GPUs are placed on nodes that have them, by count and by product. The nodes are simulated.

The tests marked `gpu` cover what an engine does with a GPU; this one covers the placement of its pod.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import hollow
from support.clusters import OneNode
from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import llmdeployment
from support.release import Release

pytestmark = [pytest.mark.scale]


@pytest.fixture
def gpu_node(one_node: OneNode) -> Iterator[None]:
    with hollow.nodes(1):
        yield


def test_engines_are_placed_on_nodes_with_free_gpus(gpu_node: None, release: Release, space: Kubectl) -> None:
    """A node of eight GPUs takes eight engines and no ninth."""
    resources = {"gpus": 1, "gpuProduct": hollow.GPU_PRODUCT}
    chat = deploy(space, llmdeployment("chat", replicas=8, resources=resources, template={"spec": hollow.PLACED}))
    space.wait(chat.target, "condition=Scheduled", 60)
    pods = chat.pods()
    assert [pod["spec"]["nodeName"] for pod in pods] == ["hollow-0"] * 8
    for pod in pods:
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert pod["spec"]["nodeSelector"]["nvidia.com/gpu.product"] == hollow.GPU_PRODUCT
    chat.scale(9)
    reported = chat.wait_reason("Scheduled", "InsufficientGPU", 60)
    assert reported["status"] == "False"
