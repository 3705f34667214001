"""The operator and the gateway detect watches whose connection stays open but delivers nothing."""

from __future__ import annotations

import time

from support.black_hole import swallowed
from support.clusters import OneNode
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.release import Release
from support.waiting import until

STALL_FOUND_S = 75.0


def test_the_operator_detects_a_silent_watch_and_continues(one_node: OneNode, release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    with swallowed(release.pods("operator"), "pagemill_operator") as connections:
        assert connections > 0
        started_s = time.monotonic()
        chat.scale(2)
        until(
            "the change is reconciled",
            lambda: space.json("get", "deployment/chat-engine")["spec"]["replicas"] == 2,
            timeout_s=STALL_FOUND_S,
        )
        print(f"a silent watch was found within {time.monotonic() - started_s:.1f} s")
        chat.wait_ready(2)


def test_the_gateway_detects_a_silent_watch_and_fails_no_request(
    one_node: OneNode, release: Release, space: Kubectl
) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    with running_load(release.service("chat")) as load:
        with swallowed(release.pods("gateway"), "pagemill_gateway") as connections:
            assert connections > 0
            deploy(space, llmdeployment("second")).wait_ready(1)
            until(
                "every gateway knows the new model",
                lambda: all(_knows(release, pod, "second") for pod in release.pods("gateway")),
                timeout_s=STALL_FOUND_S,
            )
        load.wait_for(5)
    load.report().assert_all_complete(at_least=20)


def _knows(release: Release, pod: dict[str, object], model: str) -> bool:
    return model in release.gateway_pod(pod, model).models()
