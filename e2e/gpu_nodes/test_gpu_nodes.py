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
from support.waiting import until

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


@pytest.fixture
def waiting_class(one_node: OneNode) -> Iterator[str]:
    """Return a storage class whose volumes are made where the claim's first pod is placed."""
    made = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "e2e-waits"},
        "provisioner": "e2e.pagemill.dev/none",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    one_node.kubectl.apply(made)
    yield "e2e-waits"
    one_node.kubectl.delete("storageclass/e2e-waits")


def test_a_loader_fixes_its_volume_where_the_engines_gpus_are(
    gpu_node: None, waiting_class: str, release: Release, space: Kubectl
) -> None:
    """The node without GPUs has room, and a loader needs none of them."""
    model = {"source": "hf://test/tiny", "cache": {"size": "1Gi", "storageClassName": waiting_class}}
    template = {"spec": {"tolerations": hollow.PLACED["tolerations"]}}
    resources = {"gpus": 1, "gpuProduct": hollow.GPU_PRODUCT}
    chat = deploy(space, llmdeployment("chat", model=model, resources=resources, template=template))

    def chosen() -> str | None:
        (claim,) = space.items("persistentvolumeclaims", "--selector", chat.selector) or [{}]
        notes = claim.get("metadata", {}).get("annotations", {})
        return (
            str(notes["volume.kubernetes.io/selected-node"]) if "volume.kubernetes.io/selected-node" in notes else None
        )

    assert until("the scheduler has chosen the volume's node", chosen, timeout_s=60) == "hollow-0"
    (job,) = space.items("jobs", "--selector", chat.selector)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in container["resources"].get("limits", {})
