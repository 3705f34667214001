"""Weights are fetched once from a hub onto a volume; only the loader gets the credentials of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import hubs
from support.certificates import certificate
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.objects import secret
from support.release import Release
from support.waiting import until


@pytest.fixture
def endpoint(release: Release, space: Kubectl) -> str:
    """Run a hub that requires the token in this namespace; return its URL."""
    return hubs.start(space, release.image_tag)


@pytest.mark.smoke
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


def test_a_source_with_a_private_authority_is_fetched_with_its_config_map(
    release: Release, space: Kubectl, tmp_path: Path
) -> None:
    pair = certificate(tmp_path, "hub", hubs.server_name(space))
    untrusting = hubs.cached("chat", hubs.start(space, release.image_tag, pair))
    chat = deploy(space, untrusting)
    refusal = chat.wait_reason("Ready", "HubUnreachable", 60)
    assert "certificate" in refusal["message"].lower(), refusal
    data = {"ca.crt": pair["tls.crt"]}
    space.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "authority"}, "data": data})
    template = untrusting["spec"]["template"]["spec"]
    template["volumes"] = [{"name": "authority", "configMap": {"name": "authority"}}]
    template["containers"][0]["volumeMounts"] = [{"name": "authority", "mountPath": "/etc/authority"}]
    untrusting["spec"]["engine"]["env"].append({"name": "SSL_CERT_FILE", "value": "/etc/authority/ca.crt"})
    space.apply(untrusting)
    chat.wait_ready(1)
    assert release.service("chat").ask()


def test_a_source_that_is_out_of_reach_is_one_reason_that_stays(release: Release, space: Kubectl) -> None:
    """As behind a network policy, which this cluster does not enforce: no connection to the address opens."""
    space.apply(secret(hubs.CREDENTIALS, token=hubs.TOKEN))
    chat = deploy(space, hubs.cached("chat", "http://192.0.2.1:8080"))
    until("the loader has started", lambda: _has_loader_started(chat), timeout_s=30)
    refusal = chat.wait_reason("Ready", "HubUnreachable", 20)
    assert "NetworkPolicy chat-engine" in refusal["message"], refusal
    seen = set()

    def has_tried_again() -> bool:
        seen.add(chat.condition("Ready")["reason"])
        return _num_attempts(chat) >= 3

    until("the loader has tried three times more", has_tried_again, timeout_s=180, interval_s=0.3)
    assert seen == {"HubUnreachable"}


def _has_loader_started(chat: Deployed) -> bool:
    statuses = [each for pod in _loader_pods(chat) for each in pod["status"].get("containerStatuses", [])]
    return any("waiting" not in each["state"] or each["restartCount"] for each in statuses)


def _num_attempts(chat: Deployed) -> int:
    """Return how often the loader that runs has found that nothing answers."""
    return sum(
        chat.kubectl.run("logs", pod["metadata"]["name"]).stdout.count("HubUnreachable") for pod in _loader_pods(chat)
    )


def _loader_pods(chat: Deployed) -> list[dict[str, Any]]:
    return chat.kubectl.items("pods", "--selector", f"{chat.selector},app.kubernetes.io/component=loader")


def _loader(chat: Deployed) -> dict[str, Any]:
    jobs = chat.kubectl.items("jobs", "--selector", chat.selector)
    assert len(jobs) == 1
    return jobs[0]
