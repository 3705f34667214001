"""Rollouts on nodes without room for one more replica: they replace in place where no request fails by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from observed_world import READY, World, running

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.kubernetes.in_place import Rollout, rollout_of
from pagemill_operator.backends.kubernetes.render import render_children
from pagemill_operator.backends.kubernetes.render.names import IN_PLACE_ANNOTATION, TEMPLATE_ANNOTATION
from pagemill_operator.backends.kubernetes.snapshot import Manifest, Owner, RenderContext

Make = Callable[..., LLMDeployment]
START = datetime(2026, 1, 1, tzinfo=UTC)
FULL = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}
QUICK, SLOW = 5_000, 500_000
"""Milliseconds of the latest start; requests wait for 60 s."""


@pytest.fixture
def world(deployment: Make) -> Callable[..., World]:
    def make(num_old: int = 1, start_ms: int | None = None, **changes: Any) -> World:
        """Old replicas that serve, and a new one that finds no node."""
        made = World(deployment(replicas=num_old, resources={"gpus": 1}, **changes)).apply()
        old = copy.deepcopy(made.objects["Deployment", "chat-engine"]["spec"]["template"])
        old["metadata"]["annotations"][TEMPLATE_ANNOTATION] = "old"
        for _ in range(num_old):
            made.pod(running(started=True, ready=True), conditions=READY, template=old)
        made.pod(node="", conditions=(FULL,))
        made.status = {} if start_ms is None else {"lastStart": {"totalMs": start_ms}}
        return made

    return make


def rollout(world: World, seconds: float) -> Rollout:
    now = START + timedelta(seconds=seconds)
    return rollout_of(world.plan, world.snapshot.owner, world.objects, world.pods, now)


def strategy(world: World, in_place: str) -> Any:
    context = RenderContext(namespace="pagemill-system", engine_image="pagemill/engine:1", in_place=in_place)
    manifests = render_children(world.plan, Owner("default", "chat", "uid"), context)
    deployment: Manifest = next(each for each in manifests if each["kind"] == "Deployment")
    return deployment["spec"]["strategy"]["rollingUpdate"], deployment["metadata"]["annotations"]


def test_after_a_minute_without_a_node_replicas_are_replaced_in_place(world: Callable[..., World]) -> None:
    waits = world(num_old=2)
    assert rollout(waits, 20.0).wait_s == 40.0, "no event marks the end of the minute"
    assert not rollout(waits, 59.0).in_place
    why = rollout(waits, 60.0).in_place
    assert "another replica serves" in why
    rolling, notes = strategy(waits, why)
    assert rolling == {"maxSurge": 0, "maxUnavailable": 1}
    assert notes[IN_PLACE_ANNOTATION] == why


@pytest.mark.parametrize(("start_ms", "replaces"), [(QUICK, True), (SLOW, False), (None, False)])
def test_the_only_replica_is_replaced_in_place_if_requests_wait_for_a_start(
    world: Callable[..., World], start_ms: int | None, replaces: bool
) -> None:
    found = rollout(world(start_ms=start_ms), 100.0)
    assert bool(found.in_place) is replaces
    assert replaces or "spec.rollout.strategy to Replace" in found.remedy


def test_the_condition_says_what_follows(world: Callable[..., World]) -> None:
    alone = world(start_ms=SLOW).at(100.0)[1]["Ready"]
    assert alone.reason == "InsufficientGPU"
    assert "make room for it, or set spec.rollout.strategy to Replace" in alone.message
    both = world(num_old=2)
    seen, found = both.at(20.0)
    assert "if that lasts for 60 s, replicas are replaced in place" in found["Ready"].message
    assert seen.requeue_after_s == 40.0
    assert "replicas are replaced in place: no node has room" in both.at(61.0)[1]["Ready"].message


def test_the_decision_lasts_until_the_rollout_has_ended(world: Callable[..., World]) -> None:
    going = world(num_old=2)
    why = rollout(going, 60.0).in_place
    going.objects["Deployment", "chat-engine"]["metadata"].setdefault("annotations", {})[IN_PLACE_ANNOTATION] = why
    going.pods[2]["status"]["conditions"] = list(READY)  # the first new replica has found its node
    assert rollout(going, 200.0).in_place == why
    del going.pods[:2]
    assert rollout(going, 300.0) == Rollout()
    assert IN_PLACE_ANNOTATION not in strategy(going, "")[1]


@pytest.mark.parametrize(("name", "surge", "unavailable"), [("Surge", 1, 0), ("Replace", 0, 1)])
def test_other_strategies_stay(world: Callable[..., World], name: str, surge: int, unavailable: int) -> None:
    chosen = world(num_old=2, rollout__strategy=name)
    assert not rollout(chosen, 1000.0).in_place
    assert strategy(chosen, "")[0] == {"maxSurge": surge, "maxUnavailable": unavailable}


def test_a_replica_that_scaling_adds_is_no_rollout(world: Callable[..., World]) -> None:
    grows = world(num_old=2)
    for pod in grows.pods:
        pod["metadata"]["annotations"] = dict(grows.pods[-1]["metadata"]["annotations"])
    assert rollout(grows, 1000.0) == Rollout()
