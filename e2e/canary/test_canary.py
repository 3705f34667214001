"""Two deployments with one model name share the requests by weight; without weights, the younger one is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from support.clusters import OneNode
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.metrics import total
from support.objects import llmdeployment
from support.release import Release

REQUESTS = 320
AT_ONCE = 4
CONTROL_PORT = 8001


def test_a_canary_gets_its_share_of_the_requests(one_node: OneNode, release: Release, space: Kubectl) -> None:
    stable = deploy(space, llmdeployment("stable", model={"name": "duet"}, routing={"weight": 75}))
    canary = deploy(space, llmdeployment("canary", model={"name": "duet"}, routing={"weight": 25}))
    for deployed in (stable, canary):
        deployed.wait_ready(1)
    service = release.service("duet")
    assert service.models().count("duet") == 1
    before = {deployed.name: _answered(deployed) for deployed in (stable, canary)}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda _: service.ask(max_tokens=1), range(REQUESTS)))
    answered = {deployed.name: _answered(deployed) - before[deployed.name] for deployed in (stable, canary)}
    assert sum(answered.values()) == REQUESTS
    # Four standard deviations (7.7) around a mean of 80 in 320 draws: the check fails by chance once in 15,000 runs.
    # The mean of a half (160, deviation 9) is five of its deviations outside, that of a tenth (32, deviation 5) three.
    assert 49 <= answered["canary"] <= 111, answered


def test_a_canary_at_weight_0_gets_nothing(one_node: OneNode, release: Release, space: Kubectl) -> None:
    stable = deploy(space, llmdeployment("stable", model={"name": "duet"}, routing={"weight": 1}))
    canary = deploy(space, llmdeployment("canary", model={"name": "duet"}, routing={"weight": 0}))
    for deployed in (stable, canary):
        deployed.wait_ready(1)
    before = _answered(canary)
    for _ in range(20):
        release.service("duet").ask(max_tokens=1)
    assert _answered(canary) == before


def test_the_younger_of_two_deployments_with_one_name_is_refused_until_the_elder_is_deleted(
    release: Release, space: Kubectl
) -> None:
    elder = deploy(space, llmdeployment("elder", model={"name": "duet"}))
    elder.wait_ready(1)
    younger = deploy(space, llmdeployment("younger", model={"name": "duet"}))
    refusal = younger.wait_reason("Ready", "NameConflict")
    assert refusal["status"] == "False"
    assert "routing.weight" in refusal["message"], "the message does not name the remedy"
    assert elder.condition("Ready")["status"] == "True"
    assert release.service("duet").ask() != ""
    elder.delete()
    younger.wait_ready(1)
    assert release.service("duet").ask() != ""


def _answered(deployed: Deployed) -> float:
    return sum(total(pod, CONTROL_PORT, "vllm:request_success_total") for pod in deployed.pods())
