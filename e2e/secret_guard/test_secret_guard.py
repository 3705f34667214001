"""The operator's account writes its own Secrets and nobody else's, and of pods only notes on its engines, whatever RBAC
alone would allow.
"""

from __future__ import annotations

import json

from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import llmdeployment, secret
from support.release import Release
from support.waiting import until

DENIED = "writes only token Secrets that it made itself"
PODS_DENIED = "changes only annotations of the engines that it made"
COST = "controller.kubernetes.io/pod-deletion-cost"


def test_a_stolen_operator_account_cannot_touch_a_users_secret(release: Release, space: Kubectl) -> None:
    space.apply(secret("database", password="hunter2"))
    operator = f"--as=system:serviceaccount:{release.namespace}:{release.name}-operator"
    change = '{"stringData": {"password": "changed"}}'
    for arguments in (
        ("patch", "secret/database", "--type=merge", "--patch", change),
        ("delete", "secret/database"),
        ("create", "secret", "generic", "database-engine-token", "--from-literal=tokens=x"),
    ):
        done = space.run(*arguments, operator)
        assert done.returncode != 0
        assert DENIED in done.stderr
    assert "changed" not in space.ok("get", "secret/database", "-o", "json")


def test_a_stolen_operator_account_changes_no_pod_but_for_annotations_of_engines(
    release: Release, space: Kubectl
) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    operator = f"--as=system:serviceaccount:{release.namespace}:{release.name}-operator"
    (engine,), (gateway, *_) = chat.pods(), release.pods("gateway")
    images = [
        {"spec": {"containers": [{"name": each["spec"]["containers"][0]["name"], "image": "docker.io/miner:1"}]}}
        for each in (engine, gateway)
    ]
    note = {"metadata": {"annotations": {COST: "-1"}}}
    for pod, change in ((engine, images[0]), (gateway, images[1]), (gateway, note)):
        metadata = pod["metadata"]
        here = space.within(metadata["namespace"])
        done = here.run("patch", f"pod/{metadata['name']}", "--patch", json.dumps(change), operator)
        assert done.returncode != 0
        assert PODS_DENIED in done.stderr
    space.ok("patch", f"pod/{engine['metadata']['name']}", "--patch", json.dumps(note), operator)


def test_a_secret_that_has_the_name_already_is_left_alone_and_told(release: Release, space: Kubectl) -> None:
    space.apply(secret("chat-engine-token", note="mine"))
    before = space.json("get", "secret/chat-engine-token")
    chat = deploy(space, llmdeployment("chat"))
    condition = until(
        "the taken name is told",
        lambda: found if "chat-engine-token" in (found := chat.condition("Ready")).get("message", "") else None,
        timeout_s=60,
    )
    assert condition is not None
    assert condition["status"] == "False"
    assert "delete or rename" in condition["message"]
    after = space.json("get", "secret/chat-engine-token")
    assert after["data"] == before["data"]
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    space.delete("secret/chat-engine-token")
    chat.patch(engine={"maxNumSeqs": 6})
    chat.wait_ready(1)
