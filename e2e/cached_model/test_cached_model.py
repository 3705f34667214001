"""Weights are fetched once from a hub onto a volume; only the loader gets the credentials of the hub."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import hubs
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.objects import secret
from support.release import Release


@pytest.fixture
def endpoint(release: Release, space: Kubectl) -> str:
    """Run a hub that requires the token in this namespace; return its URL."""
    return hubs.start(space, release.image_tag)


def test_a_model_is_downloaded_once_and_served_from_its_volume(release: Release, space: Kubectl, endpoint: str) -> None:
    chat = deploy(space, hubs.cached("chat", endpoint))
    chat.wait_ready(1)
    assert "Paris" in release.service("chat").ask("What is the capital of France?")
    space.delete("pod/hub")
    chat.scale(2)
    chat.wait_ready(2)
    assert len(space.items("jobs", "--selector", chat.selector)) == 1
    chat.delete()
    assert space.items("persistentvolumeclaims") == []


def test_the_credentials_reach_the_loader_only(release: Release, space: Kubectl, endpoint: str) -> None:
    chat = deploy(space, hubs.cached("chat", endpoint))
    chat.wait_ready(1)
    loader = _loader(chat)
    assert hubs.CREDENTIALS in json.dumps(loader["spec"]["template"]["spec"])
    read = "import os, pathlib; print(os.environ, pathlib.Path('/proc/1/environ').read_bytes())"
    for pod in chat.pods():
        assert hubs.CREDENTIALS not in json.dumps(pod["spec"])
        assert hubs.TOKEN not in space.ok("exec", pod["metadata"]["name"], "--", "python", "-c", read)
    for kind in ("configmaps", "secrets"):
        children = space.items(kind, "--selector", chat.selector)
        assert hubs.TOKEN not in json.dumps(children)


def test_wrong_credentials_are_reported_with_the_remedy_until_they_are_corrected(
    release: Release, space: Kubectl, endpoint: str
) -> None:
    space.apply(secret(hubs.CREDENTIALS, token="hf-wrong"))
    chat = deploy(space, hubs.cached("chat", endpoint))
    refusal = chat.wait_reason("Ready", "Unauthorized", 120)
    assert "credential" in refusal["message"].lower(), refusal
    space.apply(secret("right-credentials", token=hubs.TOKEN))
    chat.patch(model={"credentialsSecretRef": {"name": "right-credentials"}})
    chat.wait_ready(1)


def _loader(chat: Deployed) -> dict[str, Any]:
    jobs = chat.kubectl.items("jobs", "--selector", chat.selector)
    assert len(jobs) == 1
    return jobs[0]
