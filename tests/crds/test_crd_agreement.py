"""The API server (schema and CEL) and `pagemill up` (pydantic) accept and refuse the same documents."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from examples import num_examples
from pagemill_crds.base import forbidden_changes
from pagemill_crds.explain import root, walk
from pagemill_crds.models import LLMDeployment

Admit = Callable[[dict[str, Any]], list[str]]

BASE: dict[str, Any] = {
    "apiVersion": "pagemill.dev/v1beta1",
    "kind": "LLMDeployment",
    "metadata": {"name": "chat"},
    "spec": {"model": {"source": "hf://org/name"}},
}

GOOD = [
    {},
    {"spec.replicas": 0},
    {"spec.engine": None},
    {"spec.engine.maxModelLen": None},
    {"spec.engine.kvCacheMemory": "1.5Gi"},
    {"spec.engine.kvCacheMemory": 1_000_000},
    {"spec.resources": {"gpus": 2, "gpuProduct": "NVIDIA-L4", "cpu": "500m"}, "spec.engine.tensorParallel": 2},
    {"spec.engine.tensorParallel": 4, "spec.engine.pipelineParallel": 2, "spec.resources.gpus": 4},
    {"spec.model.source": "hf://org/name@main/model.Q4_K_M.gguf"},
    {"spec.model.revision": "main", "spec.model.cache": {"size": "10Gi", "storageClassName": "fast"}},
    {"spec.model.source": "hf://org/name", "spec.model.revision": "refs/pr/1"},
    {"spec.model.source": "hf://org/name/q.gguf", "spec.model.revision": "v1"},
    {"spec.model.cache": {"claimName": "weights"}},
    {"spec.model.aliases": ["a", "b"], "spec.model.name": "c"},
    {"spec.autoscaling": {"maxReplicas": 4, "minReplicas": 0, "scaleToZeroAfter": "10m"}},
    {"spec.autoscaling": {"maxReplicas": 4, "mode": "External"}},
    {"spec.autoscaling": {"maxReplicas": 4, "slo": {"ttft": "500ms"}, "targets": {"kvCacheUsage": 0.8}}},
    {
        "spec.autoscaling": {
            "maxReplicas": 2,
            "behavior": {"scaleDown": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}},
        }
    },
    {"spec.rollout": {"maxSurge": "25%", "maxUnavailable": 1, "drainTimeout": "1h30m"}},
    {"spec.template.spec": {"nodeSelector": {"a": "b"}, "tolerations": [{"key": None}]}},
    {"spec.template.metadata.labels": {"team": "x"}},
    {
        "spec.engine.env": [
            {"name": "A", "value": ""},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ]
    },
    {"spec.engine.speculative": {"method": "draft", "source": "hf://a/b"}},
    {"spec.engine.speculative": {"method": "lookup.of-a-package"}},
    {"spec.engine.speculative": {"method": "eagle3", "source": "hf://a/b"}},
    {"spec.routing": {"weight": 0, "sessionHeader": "x-session", "queue": {"timeout": "5s"}}},
    {"spec.cost.gpuHour": 2},
    {"spec.model.generationDefaults.topP": 0.9},
]

BAD = [
    {"spec": {}},
    {"spec.model.source": "FTP://host/x"},
    {"spec.model.source": "hf://only-one-part"},
    {"spec.model.source": ""},
    {"spec.model.source": 7},
    {"spec.model.source": "file:///x", "spec.model.revision": "main"},
    {"spec.model.source": "hf://a/b@main", "spec.model.revision": "main"},
    {"spec.model.source": "file:///x", "spec.model.credentialsSecretRef": {"name": "s"}},
    {"spec.model.source": "package://a/b", "spec.model.cache": {"size": 1}},
    {"spec.model.cache": {}},
    {"spec.model.cache": {"claimName": "a", "size": 1}},
    {"spec.model.cache": {"claimName": "a", "storageClassName": "b"}},
    {"spec.model.aliases": ["a", "a"]},
    {"spec.model.aliases": ["a"], "spec.model.name": "a"},
    {"spec.model.adapters": [{"name": "x", "source": "hf://a/b"}] * 2},
    {"spec.model.generationDefaults.topP": 0},
    {"spec.modell": {}},
    {"spec.replicas": -1},
    {"spec.replicas": "2"},
    {"spec.replicas": 1.5},
    {"spec.engine.blockSize": 17},
    {"spec.engine.maxModelLen": 15},
    {"spec.engine.maxModelLen": 16, "spec.engine.blockSize": 32},
    {"spec.engine.maxNumSeqs": 64, "spec.engine.maxNumBatchedTokens": 32},
    {"spec.engine.kvCacheMemory": "1.5GB"},
    {"spec.engine.kvCacheMemory": 1.5},
    {"spec.engine.kvCacheMemory": -1},
    {"spec.engine.prefixCaching.scope": "Tenant"},
    {"spec.engine.extraArgs": ["max-num-waiting=3"]},
    {"spec.engine.env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
    {"spec.engine.env": [{"name": "A"}]},
    {"spec.engine.env": [{"name": "A", "valueFrom": {}}]},
    {"spec.engine.speculative": {"method": "draft"}},
    {"spec.engine.speculative": {"method": "two words"}},
    {"spec.engine.speculative": {"method": "ngram", "source": "hf://a/b"}},
    {"spec.resources": {"gpuProduct": "NVIDIA-L4"}},
    {"spec.resources.gpus": 2},
    {"spec.resources.cpu": "1.5m"},
    {"spec.autoscaling": {}},
    {"spec.autoscaling": {"maxReplicas": 1, "minReplicas": 2}},
    {"spec.autoscaling": {"maxReplicas": 1, "warm": 2}},
    {"spec.autoscaling": {"maxReplicas": 1, "scaleToZeroAfter": "10m"}},
    {"spec.autoscaling": {"maxReplicas": 1, "mode": "External", "targets": {"queueDepth": 1}}},
    {"spec.autoscaling": {"maxReplicas": 1, "mode": "External", "warm": 1}},
    {"spec.autoscaling": {"maxReplicas": 1, "slo": {}}},
    {"spec.autoscaling": {"maxReplicas": 1, "targets": {}}},
    {"spec.autoscaling": {"maxReplicas": 1, "slo": {"ttft": "fast"}}},
    {"spec.rollout": {"maxSurge": 0}},
    {"spec.rollout": {"maxSurge": "0%", "maxUnavailable": "0%"}},
    {"spec.rollout.maxSurge": "150%"},
    {"spec.template.metadata.name": "x"},
    {"metadata.name": "a" * 49},
    {"metadata.name": "7b-chat"},
    {"spec.model.source": "hf://a/b/q.gguf", "spec.model.revision": "refs/pr/1"},
]


def document(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the base document with these fields set."""
    value = copy.deepcopy(BASE)
    for path, new in changes.items():
        *parents, name = path.split(".")
        node = value
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = copy.deepcopy(new)
    return value


def parses(value: dict[str, Any]) -> bool:
    try:
        LLMDeployment.model_validate(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_a_valid_document_is_accepted_by_both(changes: dict[str, Any], admit: Admit) -> None:
    assert admit(document(changes)) == []
    LLMDeployment.model_validate(document(changes))


@pytest.mark.parametrize("changes", BAD, ids=str)
def test_an_invalid_document_is_refused_by_both(changes: dict[str, Any], admit: Admit) -> None:
    assert admit(document(changes))
    assert not parses(document(changes))


PATHS = [
    field.path.removeprefix("llmdeployment.") for field in walk(root()) if field.path.startswith("llmdeployment.spec")
]
SETTABLE = [path for path in PATHS if "[]" not in path]
TEXTS = [None, "", "x", "8Gi", "30s", "25%", "auto", "Active", "External", "hf://a/b", "file:///x", "X" * 1100, "0%"]
OTHERS = [-1, 0, 1, 2, 15, 16, 64, 4097, 10**9, 0.5, True, False, [], {}, ["a"], ["a", "a"], {"a": "b"}, {"name": "x"}]
VALUES = st.sampled_from([*TEXTS, *OTHERS])


@settings(max_examples=num_examples(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(SETTABLE), VALUES, min_size=1, max_size=3))
def test_both_agree_on_any_change_of_some_fields(changes: dict[str, Any], admit: Admit) -> None:
    try:
        value = document(changes)
    except (AttributeError, TypeError):
        return  # a parent was set to a scalar before its child
    assert parses(value) == (admit(value) == []), admit(value)


def test_defaults_are_the_same_on_both_sides() -> None:
    spec = LLMDeployment.model_validate(document({})).spec.model_dump(exclude_none=True)
    for field in walk(root()):
        if not field.path.startswith("llmdeployment.spec.") or "default" not in field.schema:
            continue
        names = field.path.split(".")[2:]
        value: Any = spec
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None and not isinstance(value, dict):
            assert value == field.schema["default"], field.path


def test_a_claim_cannot_move_to_another_storage_class() -> None:
    def cached(storage_class: str | None) -> LLMDeployment:
        cache = {"size": "1Gi"} | ({"storageClassName": storage_class} if storage_class else {})
        return LLMDeployment.model_validate(document({"spec.model.cache": cache}))

    ((path, message),) = forbidden_changes(cached("fast"), cached("slow"))
    assert path == "spec.model.cache.storageClassName"
    assert "new LLMDeployment" in message
    assert forbidden_changes(cached("fast"), cached("fast")) == []
    assert forbidden_changes(cached(None), cached("fast")) == []
