"""docs/how-to/keys-and-limits.md on a cluster: two gateways of two workers share one limit through the chart's Redis.

bash runs the page's commands as written, except that the limit is lowered so that a test can reach it, and that `helm`
gets the images of the node.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import yaml
from support.clusters import OneNode, program
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import Service
from support.metrics import total
from support.objects import llmdeployment
from support.release import SHARED_NAME, SHARED_NAMESPACE, Release, Releases
from support.waiting import until

from pagemill_protocol.engine_ports import engine_url
from pagemill_servers.auth import hash_key

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "keys-and-limits.md"
REDIS_IMAGE = "docker.io/library/redis:e2e"
SECRET = "pagemill-api-keys"
CONTROL_PORT = 8081
UP = "pagemill_gateway_redis_up"
LIMIT = 6
BUDGETED_FAILURES = f"sk-{secrets.token_hex(16)}"
"""A key whose requests use Redis each time and whose limit is not reached."""


@pytest.fixture
def limited(releases: Releases, one_node: OneNode, tmp_path: Path) -> Iterator[tuple[Release, str]]:
    """Create a release whose keys and Redis come from the page's commands; yield the release and the plain key."""
    with releases.absent():
        release = releases.new(SHARED_NAME, SHARED_NAMESPACE)
        try:
            release.prepare()
            environment = _environment(one_node, tmp_path)
            keys, bundled = _steps()
            more = f"echo '{hash_key(BUDGETED_FAILURES)} tenant=team-b tokens_per_day=1000000' >> keys"
            made = keys.replace("requests_per_minute=600", f"requests_per_minute={LIMIT}")
            assert made != keys
            *lines, create = made.splitlines()
            key = _bash([*lines, more, create, 'printf "key=%s" "$KEY"'], environment, tmp_path).rpartition("key=")[2]
            release.install(values={"gateway": {"workers": 2, "apiKeys": {"existingSecret": SECRET}}})
            _bash([f"ln -s {ROOT}/charts charts", *bundled.splitlines()], environment, tmp_path)
            for each in ("statefulset/pagemill-redis", "deployment/pagemill-gateway"):
                wait = ("rollout", "status", each, "--timeout=180s")
                one_node.kubectl.within(SHARED_NAMESPACE).ok(*wait, timeout_s=200)
            yield release, key
        finally:
            release.remove()


def _steps() -> tuple[str, str]:
    """Return the page's bash blocks for the Secret of keys and for the chart's Redis."""
    steps = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    keys, bundled = (step for step in steps if f"generic {SECRET}" in step or "redis.bundled" in step)
    return keys, bundled


def _bash(lines: list[str], environment: dict[str, str], folder: Path) -> str:
    script = "\n".join(["set -euo pipefail", *lines])
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{script}\n{done.stderr}"
    return done.stdout


def _environment(node: OneNode, folder: Path) -> dict[str, str]:
    """Return the reader's environment, in which `helm upgrade` uses the node's image of Redis."""
    program("redis", REDIS_IMAGE)
    repository, tag = REDIS_IMAGE.removeprefix("docker.io/").split(":")
    image = {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"}
    values = folder / "node-values.yaml"
    values.write_text(yaml.safe_dump({"image": {"redis": image}}))
    wrapper = folder / "helm"
    wrapper.write_text(f'#!/bin/sh\nexec {node.helm} "$@" --values {values}\n')
    wrapper.chmod(0o755)
    path = f"{folder}{os.pathsep}{Path(node.kubectl.binary).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "KUBECONFIG": node.kubectl.kubeconfig}


def _gateways(release: Release, key: str) -> list[Service]:
    """Return each gateway pod as a service of its own, bypassing the Service."""
    pods = release.pods("gateway")
    assert len(pods) == 2
    return [Service(f"{engine_url(pod['status']['podIP'], 8080)}/v1", key, "chat") for pod in pods]


def test_two_gateways_enforce_one_limit_and_fail_no_request_without_redis(
    one_node: OneNode, limited: tuple[Release, str], space: Kubectl
) -> None:
    release, key = limited
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    gateways = _gateways(release, key)
    for gateway in _gateways(release, BUDGETED_FAILURES):
        until("the gateway serves the model", lambda gateway=gateway: gateway.ask(max_tokens=2), timeout_s=60)
    for number in range(LIMIT):
        gateways[number % 2].ask(max_tokens=1)
    for gateway in gateways:
        with pytest.raises(openai.RateLimitError) as refused:
            gateway.ask(max_tokens=1)
        assert refused.value.code == "rate_limit_exceeded"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 61  # the header has whole seconds
    system = one_node.kubectl.within(SHARED_NAMESPACE)
    system.ok("scale", "statefulset/pagemill-redis", "--replicas=0")
    system.wait("pod/pagemill-redis-0", "delete", 60)
    for gateway in _gateways(release, BUDGETED_FAILURES) * 10:
        gateway.ask(max_tokens=2)
    system.ok("scale", "statefulset/pagemill-redis", "--replicas=1")
    system.ok("rollout", "status", "statefulset/pagemill-redis", "--timeout=120s", timeout_s=150)
    for pod in release.pods("gateway"):
        until("the gateway uses Redis again", lambda pod=pod: total(pod, CONTROL_PORT, UP) == 1, timeout_s=60)
    for gateway in _gateways(release, BUDGETED_FAILURES):
        gateway.ask(max_tokens=2)
