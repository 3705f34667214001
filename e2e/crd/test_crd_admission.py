"""The API server sets defaults and refuses bad objects with the CRD's messages; every CEL rule is violated once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HF = "hf://org/name"
PACKAGE = "package://dist/model.gguf"
SERVED = {"pagemill.dev/v1beta1", "autoscaling/v2", "v1"}

BROKEN: list[tuple[dict[str, Any], str]] = [
    (
        {"resources": {"gpus": 2}, "engine": {"tensorParallel": 1}},
        "tensorParallel x pipelineParallel must be a multiple of resources.gpus",
    ),
    ({"model": {"source": "hf://name-only"}}, "an hf:// source is hf://org/name"),
    ({"model": {"source": PACKAGE, "revision": "main"}}, "revision is for hf:// sources"),
    ({"model": {"source": f"{HF}@main", "revision": "main"}}, "the source already names a revision after @"),
    ({"model": {"source": f"{HF}/q.gguf", "revision": "refs/pr/1"}}, "a revision with / cannot be told from"),
    ({"model": {"source": PACKAGE, "credentialsSecretRef": {"name": "token"}}}, "credentials are for sources that are"),
    ({"model": {"source": PACKAGE, "cache": {"size": "1Gi"}}}, "a cache is for sources that are downloaded"),
    ({"model": {"source": HF, "cache": {"imageVolume": True}}}, "an image volume is for oci:// sources"),
    ({"model": {"source": PACKAGE, "name": "a", "aliases": ["a"]}}, "aliases must not repeat the model's own name"),
    ({"model": {"source": HF, "cache": {"size": "1Gi", "claimName": "a"}}}, "set exactly one of claimName"),
    ({"model": {"source": HF, "cache": {}}}, "set exactly one of claimName"),
    ({"model": {"source": HF, "cache": {"claimName": "a", "sizeLimit": "1Gi"}}}, "sizeLimit belongs to hostPath"),
    (
        {"model": {"source": HF, "cache": {"claimName": "a", "storageClassName": "b"}}},
        "storageClassName belongs to a new claim",
    ),
    (
        {"model": {"source": HF, "cache": {"claimName": "a", "accessMode": "ReadWriteMany"}}},
        "accessMode belongs to a new claim",
    ),
    ({"engine": {"maxNumSeqs": 64, "maxNumBatchedTokens": 32}}, "maxNumSeqs must not exceed maxNumBatchedTokens"),
    ({"engine": {"lora": {"maxLoras": 4, "maxCpuLoras": 2}}}, "maxCpuLoras must be at least maxLoras"),
    ({"engine": {"maxModelLen": 64, "blockSize": 128}}, "maxModelLen must be at least blockSize"),
    ({"engine": {"tensorParallel": 2, "podsPerReplica": 3}}, "podsPerReplica must divide tensorParallel"),
    ({"engine": {"speculative": {"method": "draft"}}}, "method draft needs the draft model's source"),
    ({"engine": {"env": [{"name": "A"}]}}, "set exactly one of value and valueFrom"),
    ({"engine": {"env": [{"name": "A", "valueFrom": {}}]}}, "set exactly one of secretKeyRef and configMapKeyRef"),
    ({"resources": {"gpuProduct": "NVIDIA-L4"}}, "gpuProduct needs GPUs"),
    ({"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas must not exceed maxReplicas"),
    ({"autoscaling": {"maxReplicas": 2, "warm": 3}}, "warm must not exceed maxReplicas"),
    ({"autoscaling": {"maxReplicas": 2, "scaleToZeroAfter": "5m"}}, "scaleToZeroAfter needs minReplicas 0"),
    ({"autoscaling": {"maxReplicas": 2, "mode": "External", "warm": 1}}, "in mode External another controller decides"),
    ({"autoscaling": {"maxReplicas": 2, "targets": {}}}, "targets are empty"),
    ({"autoscaling": {"maxReplicas": 2, "slo": {}}}, "the SLO is empty"),
    ({"rollout": {"maxSurge": 0, "maxUnavailable": "0%"}}, "maxSurge and maxUnavailable are both 0"),
]
"""Sections of a spec, each with the beginning of the message that refuses it."""

SHADOWED = {
    "aliases repeat a name",
    "two adapters have the same name",
    "two environment variables have the same name",
}
"""Rules whose violations another check of the server (set and map lists) refuses first."""

MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"model": {}}, "spec.model.source: Required value"),
    ({"model": {"source": "just-a-name"}}, "spec.model.source"),
    ({"replicas": -1}, "spec.replicas: Invalid value"),
    ({"replicas": "two"}, "spec.replicas: Invalid value"),
    ({"engine": {"dtype": "float64"}}, "spec.engine.dtype: Unsupported value"),
    ({"engine": {"kvCacheDtype": "int4"}}, "spec.engine.kvCacheDtype: Unsupported value"),
    ({"engine": {"kvCacheMemory": "lots"}}, "spec.engine.kvCacheMemory"),
    ({"engine": {"blockSize": 24}}, "spec.engine.blockSize: Unsupported value"),
    ({"routing": {"queue": {"timeout": "soon"}}}, "spec.routing.queue.timeout"),
    ({"rollout": {"drainTimeout": "60"}}, "spec.rollout.drainTimeout"),
    ({"engine": {"nonsense": 1}}, 'unknown field "spec.engine.nonsense"'),
    ({"model": {"source": PACKAGE, "aliases": ["a", "a"]}}, "Duplicate value"),
    ({"model": {"source": PACKAGE, "adapters": [{"name": "a", "source": HF}] * 2}}, "Duplicate value"),
    ({"engine": {"env": [{"name": "A", "value": "1"}] * 2}}, "Duplicate value"),
]


@pytest.mark.parametrize(("sections", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_a_broken_rule_is_refused_with_its_message(
    kubectl: Any, applied: object, deployment: Any, sections: dict[str, Any], message: str
) -> None:
    done = kubectl.run("create", "--dry-run=server", "-f", "-", stdin=deployment(**sections))
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize(("sections", "message"), MALFORMED, ids=[message for _, message in MALFORMED])
def test_a_malformed_field_is_refused_by_its_path(
    kubectl: Any, applied: object, deployment: Any, sections: dict[str, Any], message: str
) -> None:
    done = kubectl.run("create", "--validate=strict", "--dry-run=server", "-f", "-", stdin=deployment(**sections))
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize(("name", "message"), [("a" * 49, "at most 48 letters"), ("7b-chat", "put a letter first")])
def test_a_name_that_is_too_long_for_child_objects_is_refused(
    kubectl: Any, applied: object, deployment: Any, name: str, message: str
) -> None:
    document = deployment()
    document["metadata"]["name"] = name
    done = kubectl.run("create", "--dry-run=server", "-f", "-", stdin=document)
    assert message in done.stderr


def test_an_immutable_field_cannot_change(kubectl: Any, create: Callable[..., Any], deployment: Any) -> None:
    cache = {"size": "1Gi", "storageClassName": "fast", "accessMode": "ReadWriteOnce"}
    stored = create(deployment(model={"source": HF, "cache": cache}))
    stored["spec"]["model"]["cache"] |= {"storageClassName": "slow", "accessMode": "ReadWriteMany"}
    done = kubectl.run("replace", "-f", "-", stdin=stored)
    assert "storageClassName cannot change" in done.stderr
    assert "accessMode cannot change" in done.stderr


def test_every_rule_of_the_definition_is_violated_by_a_case() -> None:
    definition = yaml.safe_load((ROOT / "crds" / "llmdeployments.yaml").read_text())
    messages = set(_messages(definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    immutable = {"storageClassName cannot change", "accessMode cannot change"}
    tried = (
        {message for _, message in BROKEN}
        | SHADOWED
        | immutable
        | {"the name is too long", "the name starts with a digit"}
    )
    assert {message for message in messages if not any(message.startswith(start) for start in tried)} == set()
    assert {start for start in tried if not any(message.startswith(start) for message in messages)} == set()


def _messages(schema: dict[str, Any]) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        yield rule["message"]
    for child in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(child, dict):
            yield from _messages(child)


def test_a_minimal_object_gets_every_default(create: Callable[..., Any], deployment: Any) -> None:
    spec = create(deployment())["spec"]
    assert spec["replicas"] == 1
    assert spec["engine"] == {
        "dtype": "auto",
        "kvCacheDtype": "auto",
        "quantization": "none",
        "blockSize": 16,
        "prefixCaching": {"enabled": True, "scope": "tenant"},
        "deterministic": False,
        "tensorParallel": 1,
        "pipelineParallel": 1,
    }
    assert spec["resources"] == {"gpus": 0}
    assert spec["routing"] == {"policy": "Auto", "queue": {"maxRequests": 1000, "maxBytes": "256Mi", "timeout": "60s"}}
    assert spec["rollout"] == {"strategy": "Auto", "maxSurge": 1, "maxUnavailable": 0, "drainTimeout": "60s"}
    assert "autoscaling" not in spec, "without autoscaling, spec.replicas applies"


def test_the_servers_defaults_are_the_models_defaults(create: Callable[..., Any], deployment: Any) -> None:
    """`pagemill up` and the API server must derive the same spec from the same document."""
    from pagemill_crds.models import LLMDeployment

    document = deployment(autoscaling={"maxReplicas": 2}, engine={"speculative": {"method": "ngram"}})
    stored = create(document)
    parse = LLMDeployment.model_validate
    keep = ("apiVersion", "kind", "spec")
    here = parse({**document, "metadata": {"name": "same"}})
    there = parse({**{key: stored[key] for key in keep}, "metadata": {"name": "same"}})
    assert here.spec == there.spec


def test_the_examples_are_accepted(kubectl: Any, applied: object) -> None:
    """The examples also contain settings of other programs, whose kinds this server does not have."""
    examples = sorted((ROOT / "examples").rglob("*.yaml"))
    documents = [document for example in examples for document in yaml.safe_load_all(example.read_text())]
    known = [document for document in documents if document.get("apiVersion") in SERVED]
    assert {document["kind"] for document in known} >= {"LLMDeployment", "HorizontalPodAutoscaler"}
    for namespace in {document["metadata"].get("namespace", "default") for document in known} - {"default"}:
        kubectl.ok("create", "namespace", namespace)
    listed = {"apiVersion": "v1", "kind": "List", "items": known}
    kubectl.ok("create", "--validate=strict", "--dry-run=server", "-f", "-", stdin=listed)
