"""One model name, two deployments: a share of the requests by weight, or a refusal with the remedy."""

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
    # Four standard deviations (7.7) around a mean of 80 in 320 draws: fails by chance once in 15,000 runs. The means of
    # a
    # half (160, deviation 9) and of a tenth (32, deviation 5) are five and three of their deviations outside.
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


def test_a_name_claimed_twice_is_refused_to_the_younger_until_the_elder_leaves(
    release: Release, space: Kubectl
) -> None:
    elder = deploy(space, llmdeployment("elder", model={"name": "duet"}))
    elder.wait_ready(1)
    younger = deploy(space, llmdeployment("younger", model={"name": "duet"}))
    refusal = younger.wait_reason("Ready", "NameConflict")
    assert refusal["status"] == "False"
    assert "routing.weight" in refusal["message"], "the remedy"
    assert elder.condition("Ready")["status"] == "True"
    assert release.service("duet").ask() != ""
    elder.delete()
    younger.wait_ready(1)
    assert release.service("duet").ask() != ""


def _answered(deployed: Deployed) -> float:
    return sum(total(pod, CONTROL_PORT, "vllm:request_success_total") for pod in deployed.pods())
