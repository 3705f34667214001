"""A node drain by the Eviction API evicts the pods of a deployment one at a time."""

from __future__ import annotations

from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.release import Release


def test_evicting_every_pod_in_turn_loses_no_request(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat", replicas=2))
    chat.wait_ready(2)
    first, second = chat.pods()
    with running_load(release.service("chat")) as load:
        assert space.evict(first["metadata"]["name"]).returncode == 0
        refused = space.evict(second["metadata"]["name"])
        assert "disruption budget" in refused.stderr, "a second pod could be evicted at the same time"
        for pod, following in ((first, second), (second, None)):
            space.wait(f"pod/{pod['metadata']['name']}", "delete")
            chat.wait_ready(2)
            if following is not None:
                assert space.evict(following["metadata"]["name"]).returncode == 0
        load.wait_for(5)
    load.report().assert_all_complete(at_least=20)


def test_a_single_replica_may_be_evicted(release: Release, space: Kubectl) -> None:
    """A budget for a single replica would block every node drain."""
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    assert space.items("poddisruptionbudgets") == []
    assert space.evict(chat.pods()[0]["metadata"]["name"]).returncode == 0
    chat.wait_ready(1)
