"""Each node fetches a model of a bucket or registry once, within its size limit; one condition reports failures."""

from __future__ import annotations

import re
from pathlib import Path

from support import model_servers
from support.clusters import OneNode
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.model_servers import FILE, REPOSITORY, Bucket
from support.objects import llmdeployment
from support.release import Release
from support.waiting import until

QUESTION = "What is the capital of France?"
CLAIM = {"size": "1Gi"}
MODEL_BYTES = model_servers.model_path().stat().st_size
PROGRESS = re.compile(r"([\d.]+) of [\d.]+ [MG]iB")


def test_a_node_fetches_once_for_all_its_replicas(
    release: Release, privileged: Kubectl, bucket: Bucket, node_folder: Path
) -> None:
    before = bucket.proxy.sent_bytes
    chat = deploy(privileged, bucket.deployment("chat", {"hostPath": str(node_folder)}, replicas=2))
    chat.wait_ready(2)
    assert "Paris" in release.service("chat").ask(QUESTION)
    assert MODEL_BYTES < bucket.proxy.sent_bytes - before < 1.1 * MODEL_BYTES, (
        "the second replica downloaded the model again"
    )
    asked = len(bucket.asked)
    chat.scale(3)
    chat.wait_ready(3)
    assert bucket.asked[asked:] == []
    assert [path.name for path in node_folder.rglob("*.gguf")] == [FILE]


def test_the_cache_evicts_an_unused_model_and_never_a_used_one(
    release: Release, privileged: Kubectl, bucket: Bucket, node_folder: Path
) -> None:
    cache = {"hostPath": str(node_folder), "sizeLimit": f"{int(1.5 * MODEL_BYTES)}"}
    old = deploy(privileged, bucket.deployment("old", cache))
    old.wait_ready(1)
    (first,) = models_below(node_folder)
    new = deploy(privileged, bucket.deployment("new", cache, prefix="b"))
    refusal = new.wait_reason("Ready", "DiskFull", 120)
    for part in ("sizeLimit", "in use", first.name):
        assert part in refusal["message"], refusal
    assert models_below(node_folder) == [first]
    old.delete()
    new.wait_ready(1)
    (second,) = models_below(node_folder)
    assert second != first
    assert "Paris" in release.service("new").ask(QUESTION)


def test_the_condition_reports_the_progress_of_the_loader(space: Kubectl, release: Release, bucket: Bucket) -> None:
    space.apply(model_servers.bucket_keys())
    bucket.proxy.bytes_per_s = 1.2e6  # the limit of each of the four connections
    chat = deploy(space, bucket.deployment("chat", CLAIM))
    first = progress(chat, 0)
    assert progress(chat, first) > first
    bucket.proxy.bytes_per_s = float("inf")
    chat.wait_ready(1)
    assert "Paris" in release.service("chat").ask(QUESTION)


def test_a_refused_credential_is_reported_until_it_is_corrected(
    space: Kubectl, release: Release, bucket: Bucket
) -> None:
    space.apply(model_servers.bucket_keys(password="not-the-secret"))
    chat = deploy(space, bucket.deployment("chat", CLAIM))
    refusal = chat.wait_reason("Ready", "Unauthorized", 120)
    for part in ("s3://models/a", "SignatureDoesNotMatch", "spec.model.credentialsSecretRef"):
        assert part in refusal["message"], refusal
    assert "not-the-secret" not in refusal["message"]
    space.apply(model_servers.bucket_keys())
    chat.wait_ready(1)


def test_a_source_that_no_kind_reads_is_refused_before_anything_is_created(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat", model={"source": "http://example.org/x"}))
    refusal = chat.wait_reason("Planned", "UnsupportedField")
    for part in ("spec.model.source", "unknown scheme `http`", "`s3://BUCKET/PREFIX"):
        assert part in refusal["message"], refusal
    assert chat.pods() == []


def test_an_image_of_a_registry_is_fetched_onto_a_volume(release: Release, one_node: OneNode, space: Kubectl) -> None:
    with model_servers.registry(one_node) as registry:
        space.apply(model_servers.registry_login(registry.host))
        chat = deploy(space, from_registry(registry.host, CLAIM))
        chat.wait_ready(1)
        assert "Paris" in release.service("chat").ask(QUESTION)
        assert [path for path, _ in registry.asked if path == "/token"], "the registry did not require a password"


def test_the_kubelet_mounts_an_image_as_the_models_folder(release: Release, one_node: OneNode, space: Kubectl) -> None:
    with model_servers.registry(one_node) as registry:
        space.apply(model_servers.registry_login("elsewhere"))
        chat = deploy(space, from_registry(registry.host, {"imageVolume": True}))
        refusal = chat.wait_reason("Ready", "ImagePullFailed", 120)
        assert "spec.model.credentialsSecretRef" in refusal["message"], refusal
        space.apply(model_servers.registry_login(registry.host))
        chat.wait_ready(1, timeout_s=150)
        assert "Paris" in release.service("chat").ask(QUESTION)
        asked = len(registry.asked)
        chat.scale(2)
        chat.wait_ready(2)
        assert [path for path, _ in registry.asked[asked:] if "/blobs/" in path] == []


def from_registry(host: str, cache: dict[str, object]) -> dict[str, object]:
    model = {
        "source": f"oci://{host}/{REPOSITORY}:v1",
        "credentialsSecretRef": {"name": model_servers.CREDENTIALS},
        "cache": cache,
    }
    plain = [{"name": "PAGEMILL_PLAIN_HTTP_REGISTRIES", "value": host}]
    return llmdeployment("chat", model=model, engine={"env": plain})


def models_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def progress(chat: Deployed, more_than: float) -> float:
    """Wait until the condition reports more than `more_than` units; return the reported number."""

    def found() -> float | None:
        condition = chat.condition("ModelLoaded")
        match = PROGRESS.search(condition.get("message", ""))
        return float(match[1]) if match and float(match[1]) > more_than else None

    return until(f"the condition says more than {more_than}", found, timeout_s=90) or 0.0
