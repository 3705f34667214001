"""What one turn writes and what it leaves alone: the backend against an API server of a few lines, without watches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.kubernetes.backend import TRIES, KubernetesCluster
from pagemill_operator.backends.kubernetes.client import ApiError
from pagemill_operator.backends.kubernetes.snapshot import RenderContext
from pagemill_operator.controller.cache import Cache
from pagemill_operator.plan import Plan, make_plan
from pagemill_operator.plan.types import Problem

Manifest = dict[str, Any]
KEY = "default/chat"
SOURCE = "hf://org/model"


class Api:
    """Takes what is applied, as a webhook and a refusal of the test want it."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.writes: list[str] = []
        self.mutate: Callable[[Manifest], Any] = lambda manifest: None
        self.refuse: Callable[[Manifest], ApiError | None] = lambda manifest: None
        self.versions = itertools.count(10)

    async def find(self, kind: Any, namespace: str, name: str) -> Manifest | None:
        return copy.deepcopy(self.objects.get((kind.name, name)))

    async def apply(self, kind: Any, manifest: Manifest, *, force: bool) -> Manifest:
        return self._take("apply", manifest)

    async def merge(self, kind: Any, namespace: str, name: str, patch: Manifest) -> Manifest:
        known = self.objects[kind.name, name]
        assert patch["metadata"]["resourceVersion"] == known["metadata"]["resourceVersion"]
        return self._take("merge", {**known, "spec": {**known["spec"], **patch["spec"]}})

    async def delete(self, kind: Any, manifest: Manifest) -> None:
        self.writes.append(f"delete {kind.name}")
        self.objects.pop((kind.name, manifest["metadata"]["name"]), None)

    def _take(self, verb: str, manifest: Manifest) -> Manifest:
        self.writes.append(f"{verb} {manifest['kind']}")
        if error := self.refuse(manifest):
            raise error
        at = (manifest["kind"], manifest["metadata"]["name"])
        known = self.objects.get(at, {"metadata": {"uid": f"uid-{at}", "creationTimestamp": "2026-01-02T00:00:00Z"}})
        taken = copy.deepcopy(manifest)
        self.mutate(taken)
        taken["metadata"] = {**known["metadata"], **taken["metadata"], "resourceVersion": str(next(self.versions))}
        self.objects[at] = {"status": known.get("status", {}), **taken}
        return copy.deepcopy(self.objects[at])


class World:
    def __init__(self) -> None:
        self.api = Api()
        self.cache = Cache("system", {"app": "gateway"})
        self.tokens = ("one",)
        client: Any = self.api
        self.cluster = KubernetesCluster(client, self.cache, self._context)
        self.own("uid-1")

    def _context(self, owner: Any, loader_done: bool) -> RenderContext:
        return RenderContext("system", "engine:1", tokens=self.tokens, loader_done=loader_done)

    def own(self, uid: str, *, created: str = "2026-01-01T00:00:00Z") -> None:
        metadata = {"name": "chat", "namespace": "default", "uid": uid, "generation": 1, "creationTimestamp": created}
        metadata["resourceVersion"] = "1"
        self.cache.remove("LLMDeployment", "default", "chat")
        self.cache.put("LLMDeployment", {"metadata": metadata, "spec": {"model": {"source": SOURCE}}})

    def plan(self, **spec: Any) -> Plan:
        document = {"metadata": {"name": "chat"}, "spec": {"model": {"source": SOURCE}, **spec}}
        api = {"apiVersion": "pagemill.dev/v1alpha1", "kind": "LLMDeployment"}
        return make_plan(LLMDeployment.model_validate({**api, **document}), "kubernetes")

    def cached(self, **spec: Any) -> Plan:
        return self.plan(model={"source": SOURCE, "cache": {"size": "1Gi"}}, **spec)

    def get(self, kind: str) -> Manifest:
        return next(child for (at, _), child in self.api.objects.items() if at == kind)

    def change(self, kind: str, **content: Any) -> None:
        """Somebody else writes; the watch tells."""
        known = self.get(kind)
        metadata = {**known["metadata"], **content.pop("metadata", {})}
        metadata["resourceVersion"] = str(next(self.api.versions))
        known |= {**content, "metadata": metadata}
        self.cache.put(kind, known)

    def take(self) -> list[str]:
        """The writes since the last time."""
        writes, self.api.writes = self.api.writes, []
        return writes


@pytest.fixture
def world() -> World:
    return World()


async def test_what_stands_is_not_written_again(world: World) -> None:
    assert await world.cluster.carry_out(world.plan())
    assert "apply Deployment" in world.take()
    assert not await world.cluster.carry_out(world.plan())
    assert world.take() == []


async def test_tokens_turn_while_a_spec_is_refused(world: World) -> None:
    await world.cluster.carry_out(world.plan())
    world.take()
    world.tokens = ("two", "one")
    assert await world.cluster.refuse(KEY, [Problem("spec", None, "unreadable")])
    assert world.take() == ["apply Secret"]
    world.tokens = ("three", "two")
    unsupported = world.plan(engine={"quantization": "fp8"})
    assert unsupported.problems
    await world.cluster.carry_out(unsupported)
    assert world.take() == ["apply Secret"]


async def test_a_refused_spec_that_never_ran_gets_no_tokens(world: World) -> None:
    assert not await world.cluster.refuse(KEY, [Problem("spec", None, "unreadable")])
    assert world.take() == []


async def test_a_child_that_a_webhook_rewrites_is_written_once(world: World) -> None:
    def rewrite(manifest: Manifest) -> None:
        if manifest["kind"] == "Deployment":
            manifest["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror/engine:1"

    world.api.mutate = rewrite
    await world.cluster.carry_out(world.plan())
    world.take()
    assert not await world.cluster.carry_out(world.plan())
    world.change("Deployment", spec={**world.get("Deployment")["spec"], "replicas": 7})
    assert await world.cluster.carry_out(world.plan())
    assert world.take() == ["apply Deployment"]
    assert not await world.cluster.carry_out(world.plan())


async def test_what_may_pass_is_told_when_it_lasts(world: World) -> None:
    message = 'Internal error occurred: failed calling webhook "policy.corp": connection refused'
    world.api.refuse = lambda child: ApiError(500, "InternalError", message) if child["kind"] == "Service" else None
    for number in range(1, TRIES + 1):
        with pytest.raises(ApiError):
            await world.cluster.carry_out(world.plan())
        assert world.cluster.has_apply_errors(KEY) is (number == TRIES)
    fault = world.cluster.observe(KEY).fault
    assert fault is not None
    assert (fault.stage, fault.reason) == ("Scheduled", "WebhookFailed")
    assert "policy.corp" in fault.message
    assert "apply Deployment" not in world.take()
    world.api.refuse = lambda child: None
    await world.cluster.carry_out(world.plan())
    assert world.cluster.observe(KEY).fault is None
