"""The operator's account may write only its own Secrets and, on pods, only annotations of engines.

The admission policy enforces this where RBAC alone would allow more.
"""

from __future__ import annotations

import json

from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import Document, llmdeployment, probe_pod, secret
from support.release import Release
from support.waiting import until

DENIED = "writes only token Secrets that it made itself"
PODS_DENIED = "may change only annotations of its engine pods"
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


def test_a_stolen_operator_account_can_change_only_annotations_of_engine_pods(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    idle = ["python", "-c", "import time; time.sleep(600)"]
    space.apply(probe_pod("mine", f"docker.io/pagemill/gateway:{release.image_tag}", idle))
    account = f"{release.namespace}:{release.name}-operator"
    # kubectl reads what it patches, which the operator may not read; no other right is added.
    space.ok("create", "role", "reader", "--verb=get", "--resource=pods")
    space.ok("create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={account}")
    engine = f"pod/{chat.pods()[0]['metadata']['name']}"
    note = {"metadata": {"annotations": {COST: "-1"}}}

    def patch(target: str, change: Document) -> list[str]:
        return ["patch", target, "--patch", json.dumps(change), f"--as=system:serviceaccount:{account}"]

    for target, change in ((engine, _image("engine")), ("pod/mine", _image("probe")), ("pod/mine", note)):
        done = space.run(*patch(target, change))
        assert done.returncode != 0
        assert PODS_DENIED in done.stderr
    space.ok(*patch(engine, note))


def _image(container: str) -> Document:
    return {"spec": {"containers": [{"name": container, "image": "docker.io/miner:1"}]}}


def test_a_users_secret_with_the_operators_name_is_reported_and_not_changed(release: Release, space: Kubectl) -> None:
    space.apply(secret("chat-engine-token", note="mine"))
    before = space.json("get", "secret/chat-engine-token")
    chat = deploy(space, llmdeployment("chat"))
    condition = until(
        "the taken name is reported",
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
