"""Engines accept only the gateway's token on their internal routes; its key is rotated without a failed request."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from support.clusters import OneNode
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment, probe_pod
from support.release import Release
from support.waiting import until

INTERNAL = [
    ("GET", 8000, "/internal/link"),
    ("GET", 8001, "/internal/state"),
    ("GET", 8001, "/internal/bundle"),
    ("POST", 8001, "/internal/drain"),
    ("POST", 8001, "/internal/drained"),
]
PROBE = """
import http.client, json, sys
address, routes, tokens = json.loads(sys.argv[1])
found = {}
for method, port, path in routes:
    for name, token in tokens.items():
        connection = http.client.HTTPConnection(address, port, timeout=10)
        connection.request(method, path, headers={"Authorization": f"Bearer {token}"} if token else {})
        found[f"{path} {name}"] = connection.getresponse().status
print(json.dumps(found))
"""
KEYS = "secret/pagemill-keys"
ROTATED_AT = "pagemill.dev/rotated-at"
ROTATIONS = 3
"""Number of rotations after which the key of the first token is no longer kept."""


def test_another_pod_is_refused_with_no_token_and_with_a_wrong_one(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat"))
    stranger = deploy(space, llmdeployment("stranger"))
    for deployed in (chat, stranger):
        deployed.wait_ready(1)
    tokens = {"without": "", "wrong": "x" * 64, "of another deployment": _accepted_tokens(stranger)[0]}
    statuses = _probe(release, space, [chat.pods()[0]["status"]["podIP"], INTERNAL, tokens])
    assert len(statuses) == len(INTERNAL) * len(tokens)
    assert set(statuses.values()) <= {401, 403}, statuses
    own = {"own": _accepted_tokens(chat)[0]}
    allowed = _probe(release, space, [chat.pods()[0]["status"]["podIP"], [("GET", 8001, "/internal/bundle")], own])
    assert set(allowed.values()) == {200}, "the probe's own request must be correct"


@pytest.mark.timeout(900)
def test_replacing_the_key_three_times_fails_no_request(one_node: OneNode, release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    first = _accepted_tokens(chat)
    pods = [pod["metadata"]["uid"] for pod in chat.pods()]
    with running_load(release.service("chat"), workers=2) as load:
        for _ in range(ROTATIONS):
            before = _accepted_tokens(chat)
            _let_the_key_grow_old(release)
            until("the engine's Secret has a new token", partial(_differ, chat, before), timeout_s=60)
            until("the engine's file has the new token", lambda: _file_is_current(chat), timeout_s=150, interval_s=2)
            load.wait_for(5)
    load.report().assert_all_complete(at_least=30)
    assert set(first).isdisjoint(_accepted_tokens(chat))
    assert [pod["metadata"]["uid"] for pod in chat.pods()] == pods, "a new key restarted an engine"


def _probe(release: Release, space: Kubectl, question: Any) -> dict[str, int]:
    image = f"docker.io/pagemill/gateway:{release.image_tag}"
    space.apply(probe_pod("probe", image, ["python", "-c", PROBE, json.dumps(question)]))
    space.wait("pod/probe", "jsonpath={.status.phase}=Succeeded", 60)
    statuses: dict[str, int] = json.loads(space.ok("logs", "probe"))
    space.delete("pod/probe")
    return statuses


def _accepted_tokens(deployed: Deployed) -> list[str]:
    template = "go-template={{.data.tokens | base64decode}}"
    return deployed.kubectl.ok("get", f"secret/{deployed.name}-engine-token", "-o", template).split()


def _differ(deployed: Deployed, tokens: list[str]) -> bool:
    return _accepted_tokens(deployed) != tokens


def _file_is_current(deployed: Deployed) -> bool:
    """Whether the kubelet has updated the Secret in the running container."""
    pod = deployed.pods()[0]["metadata"]["name"]
    read = "print(open('/var/run/secrets/pagemill/tokens').read())"
    return deployed.kubectl.ok("exec", pod, "--", "python", "-c", read).split() == _accepted_tokens(deployed)


def _let_the_key_grow_old(release: Release) -> None:
    """Set the time of the last rotation far into the past, so that the operator must rotate the key."""
    keys = release.cluster.kubectl.within(release.namespace)
    keys.ok("annotate", KEYS, f"{ROTATED_AT}=2026-01-01T00:00:00Z", "--overwrite")
