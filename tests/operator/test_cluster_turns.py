"""The writes of one reconcile: the backend with a minimal API server, without watches."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from engine_reports import reported

from pagemill_crds.models import LLMDeployment
from pagemill_kube.errors import ApiError
from pagemill_operator.backends.kubernetes.backend import TRIES, KubernetesCluster
from pagemill_operator.backends.kubernetes.deletion_cost import COST_ANNOTATION
from pagemill_operator.backends.kubernetes.render.names import ADAPTERS_ANNOTATION
from pagemill_operator.backends.kubernetes.snapshot import DIGEST_ANNOTATION, RenderContext
from pagemill_operator.backends.kubernetes.writes import MOST_NOTES
from pagemill_operator.controller.watching.cache import ObjectCache
from pagemill_operator.plan import Plan, make_plan
from pagemill_operator.plan.types import Problem
from pagemill_protocol.report.adapters import WantedAdapter
from pagemill_protocol.report.load import EngineReport

Manifest = dict[str, Any]
KEY = "default/chat"
SOURCE = "hf://org/model"


class Api:
    """An API server that applies what is written, with the webhook and refusals of the test."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.writes: list[str] = []
        self.mutate: Callable[[Manifest], Any] = lambda manifest: None
        self.report_invalid: Callable[[Manifest], ApiError | None] = lambda manifest: None
        self.versions = itertools.count(10)
        self.now = "2026-01-02T00:00:00Z"

    def names(self) -> set[str]:
        return {kind for kind, _ in self.objects}

    async def find(self, kind: Any, namespace: str, name: str) -> Manifest | None:
        return copy.deepcopy(self.objects.get((kind.name, name)))

    async def apply(self, kind: Any, manifest: Manifest, *, force: bool) -> Manifest:
        return self._take("apply", manifest)

    async def merge(self, kind: Any, namespace: str, name: str, patch: Manifest) -> Manifest:
        known = self.objects[kind.name, name]
        if kind.name == "Pod":
            notes = {**known["metadata"].get("annotations", {}), **patch["metadata"]["annotations"]}
            return self._take("merge", {**known, "metadata": {**known["metadata"], "annotations": notes}})
        assert patch["metadata"]["resourceVersion"] == known["metadata"]["resourceVersion"]
        metadata = {**known["metadata"], **patch["metadata"]}
        return self._take("merge", {**known, "metadata": metadata, "spec": {**known["spec"], **patch.get("spec", {})}})

    async def delete(self, kind: Any, manifest: Manifest) -> None:
        self.writes.append(f"delete {kind.name}")
        self.objects.pop((kind.name, manifest["metadata"]["name"]), None)

    def _take(self, verb: str, manifest: Manifest) -> Manifest:
        self.writes.append(f"{verb} {manifest['kind']}")
        if error := self.report_invalid(manifest):
            raise error
        at = (manifest["kind"], manifest["metadata"]["name"])
        known = self.objects.get(at, {"metadata": {"uid": f"uid-{at}", "creationTimestamp": self.now}})
        taken = copy.deepcopy(manifest)
        self.mutate(taken)
        taken["metadata"] = {**known["metadata"], **taken["metadata"], "resourceVersion": str(next(self.versions))}
        self.objects[at] = {"status": known.get("status", {}), **taken}
        return copy.deepcopy(self.objects[at])


class World:
    def __init__(self) -> None:
        self.api = Api()
        self.cache = ObjectCache("system", {"app": "gateway"})
        self.tokens = ("one",)
        self.image = "engine:1"
        client: Any = self.api
        self.held: dict[str, EngineReport] = {}
        self.cluster = KubernetesCluster(client, self.cache, self._context, held=lambda key: self.held)
        self.own("uid-1")

    def _context(self, owner: Any, loader_done: bool) -> RenderContext:
        return RenderContext("system", self.image, tokens=self.tokens, loader_done=loader_done)

    def own(self, uid: str, *, created: str = "2026-01-01T00:00:00Z") -> None:
        metadata = {"name": "chat", "namespace": "default", "uid": uid, "generation": 1, "creationTimestamp": created}
        metadata["resourceVersion"] = "1"
        self.cache.remove("LLMDeployment", "default", "chat")
        self.cache.put("LLMDeployment", {"metadata": metadata, "spec": {"model": {"source": SOURCE}}})

    def plan(self, **spec: Any) -> Plan:
        document = {"metadata": {"name": "chat"}, "spec": {"model": {"source": SOURCE}, **spec}}
        api = {"apiVersion": "pagemill.dev/v1beta1", "kind": "LLMDeployment"}
        return make_plan(LLMDeployment.model_validate({**api, **document}), "kubernetes")

    def cached(self, **spec: Any) -> Plan:
        return self.plan(model={"source": SOURCE, "cache": {"size": "1Gi"}}, **spec)

    def get(self, kind: str) -> Manifest:
        return next(child for (at, _), child in self.api.objects.items() if at == kind)

    def change(self, kind: str, **content: Any) -> None:
        """Write an object as another client; the watch reports it."""
        known = self.get(kind)
        metadata = {**known["metadata"], **content.pop("metadata", {})}
        metadata["resourceVersion"] = str(next(self.api.versions))
        known |= {**content, "metadata": metadata}
        self.cache.put(kind, known)

    async def settle(self, plan: Plan) -> None:
        while await self.cluster.apply_plan(plan):
            pass

    def run_pods(self, **blocks: int) -> None:
        """Create ready pods of the Deployment with their used blocks."""
        template = self.get("Deployment")["spec"]["template"]["metadata"]
        for name, count in blocks.items():
            metadata = {"name": name, "namespace": "default", "uid": name, "resourceVersion": "5", **template}
            status = {"conditions": [{"type": "Ready", "status": "True"}]}
            pod = {"kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": status}
            self.api.objects["Pod", name] = pod
            self.cache.put("Pod", pod)
            self.held[name] = reported(name, count)

    def remove(self, kind: str) -> None:
        """Delete an object as another client; the watch reports it."""
        name = self.get(kind)["metadata"]["name"]
        self.api.objects.pop((kind, name))
        self.cache.remove(kind, "default", name)

    def take(self) -> list[str]:
        """Return the writes since the last call."""
        writes, self.api.writes = self.api.writes, []
        return writes


@pytest.fixture
def world() -> World:
    return World()


async def test_an_unchanged_object_is_not_written_again(world: World) -> None:
    assert await world.cluster.apply_plan(world.plan())
    assert "apply Deployment" in world.take()
    assert not await world.cluster.apply_plan(world.plan())
    assert world.take() == []


async def test_tokens_are_rotated_while_a_spec_is_refused(world: World) -> None:
    await world.cluster.apply_plan(world.plan())
    world.take()
    world.tokens = ("two", "one")
    assert await world.cluster.report_invalid(KEY, [Problem("spec", None, "unreadable")])
    assert world.take() == ["apply Secret"]
    world.tokens = ("three", "two")
    unsupported = world.plan(engine={"quantization": "fp8"})
    assert unsupported.problems
    await world.cluster.apply_plan(unsupported)
    assert world.take() == ["apply Secret"]


async def test_a_refused_spec_that_never_ran_gets_no_tokens(world: World) -> None:
    assert not await world.cluster.report_invalid(KEY, [Problem("spec", None, "unreadable")])
    assert world.take() == []


async def test_a_child_that_a_webhook_changes_is_written_once(world: World) -> None:
    def rewrite(manifest: Manifest) -> None:
        if manifest["kind"] == "Deployment":
            manifest["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror/engine:1"

    world.api.mutate = rewrite
    await world.cluster.apply_plan(world.plan())
    world.take()
    assert not await world.cluster.apply_plan(world.plan())
    world.change("Deployment", spec={**world.get("Deployment")["spec"], "replicas": 7})
    assert await world.cluster.apply_plan(world.plan())
    assert world.take() == ["apply Deployment"]
    assert not await world.cluster.apply_plan(world.plan())


async def test_a_fault_that_may_be_temporary_is_reported_when_it_lasts(world: World) -> None:
    message = 'Internal error occurred: failed calling webhook "policy.corp": connection refused'
    world.api.report_invalid = lambda child: (
        ApiError(500, "InternalError", message) if child["kind"] == "Service" else None
    )
    for number in range(1, TRIES + 1):
        with pytest.raises(ApiError):
            await world.cluster.apply_plan(world.plan())
        assert world.cluster.has_apply_errors(KEY) is (number == TRIES)
    fault = world.cluster.observe(KEY).fault
    assert fault is not None
    assert (fault.stage, fault.reason) == ("Scheduled", "WebhookFailed")
    assert "policy.corp" in fault.message
    assert "apply Deployment" not in world.take()
    world.api.report_invalid = lambda child: None
    await world.cluster.apply_plan(world.plan())
    assert world.cluster.observe(KEY).fault is None


COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}]}


async def test_an_unfinished_loader_restarts_if_its_spec_changes(world: World) -> None:
    await world.settle(world.cached())
    world.image = "engine:2"
    await world.cluster.apply_plan(world.cached())
    assert world.take()[-1] == "delete Job"
    await world.settle(world.cached())
    assert world.get("Job")["spec"]["template"]["spec"]["containers"][0]["image"] == "engine:2"


async def test_a_finished_loader_stays_whatever_changes(world: World) -> None:
    await world.settle(world.cached())
    world.change("Job", status=COMPLETE)
    world.image = "engine:2"
    await world.settle(world.cached())
    assert "delete Job" not in world.take()
    assert "Deployment" in world.api.names()


async def test_a_lost_volume_is_filled_again(world: World) -> None:
    await world.settle(world.cached())
    world.change("Job", status=COMPLETE)
    await world.settle(world.cached())
    assert world.cluster.observe(KEY).loader is None
    world.remove("PersistentVolumeClaim")
    assert world.cluster.observe(KEY).loader is not None
    world.api.now = "2026-01-03T00:00:00Z"
    world.take()
    await world.settle(world.cached())
    writes = world.take()
    assert [each for each in writes if "Job" in each] == ["delete Job", "apply Job"]
    assert "apply PersistentVolumeClaim" in writes
    world.change("Job", status=COMPLETE)
    await world.settle(world.cached())
    assert world.cluster.observe(KEY).loader is None


async def test_a_refused_claim_does_not_create_and_delete_jobs(world: World) -> None:
    error = ApiError(403, "Forbidden", "exceeded quota")
    world.api.report_invalid = lambda child: error if child["kind"] == "PersistentVolumeClaim" else None
    for _ in range(3):
        await world.cluster.apply_plan(world.cached())
    assert [each for each in world.take() if "Job" in each] == ["apply Job"]


def orphan(world: World) -> None:
    """Delete the deployment with `--cascade=orphan` and create it again: what it made stays, with its pods."""
    for kind, name in list(world.api.objects):
        if kind != "Pod":
            known = world.api.objects[kind, name]
            metadata = {at: value for at, value in known["metadata"].items() if at != "ownerReferences"}
            known["metadata"] = {**metadata, "resourceVersion": str(next(world.api.versions))}
            world.cache.put(kind, known)
    world.own("uid-2", created="2026-02-01T00:00:00Z")


async def test_what_a_deleted_deployment_left_is_adopted_with_its_pods(world: World) -> None:
    await world.settle(world.cached())
    world.change("Job", status=COMPLETE)
    await world.settle(world.cached())
    world.run_pods(a=1)
    world.change("Pod", metadata={"creationTimestamp": "2026-01-15T00:00:00Z"})
    orphan(world)
    world.take()
    await world.settle(world.cached())
    assert "merge Job" in world.take()
    owners = {
        kind: child["metadata"]["ownerReferences"][0]["uid"]
        for (kind, _), child in world.api.objects.items()
        if kind != "Pod"
    }
    assert {"Job", "PersistentVolumeClaim", "Deployment"} <= owners.keys()
    assert set(owners.values()) == {"uid-2"}
    assert [replica.name for replica in world.cluster.observe(KEY).replicas] == ["a"]
    assert world.cluster.observe(KEY).loader is None


async def test_pods_of_an_earlier_deployment_that_still_end_are_not_counted(world: World) -> None:
    await world.settle(world.plan())
    world.run_pods(a=1)
    world.change("Pod", metadata={"creationTimestamp": "2026-01-15T00:00:00Z"})
    world.own("uid-2", created="2026-02-01T00:00:00Z")
    assert world.cluster.snapshot(KEY).pods == ()


async def test_a_recreated_deployment_waits_until_the_earlier_ones_children_are_deleted(world: World) -> None:
    await world.settle(world.plan())
    world.change("Service", metadata={"deletionTimestamp": "2026-02-01T00:00:00Z"})
    world.own("uid-2", created="2026-02-01T00:00:00Z")
    world.take()
    await world.cluster.apply_plan(world.plan())
    assert {each.split()[0] for each in world.take()} == {"delete"}
    assert world.cluster.snapshot(KEY).children == {}
    assert not await world.cluster.apply_plan(world.plan())
    world.remove("Service")
    assert await world.cluster.apply_plan(world.plan())
    assert {child["metadata"]["ownerReferences"][0]["uid"] for child in world.api.objects.values()} == {"uid-2"}


async def test_pods_of_an_earlier_deployment_are_not_counted(world: World) -> None:
    await world.settle(world.plan())
    labels = {"pagemill.dev/deployment": "chat", "app.kubernetes.io/component": "engine"}
    times = {"old": "2026-01-05T00:00:00Z", "skewed": "2026-01-31T23:59:58Z", "new": "2026-02-02T00:00:00Z"}
    for name, created in times.items():
        metadata = {"name": name, "namespace": "default", "uid": name, "resourceVersion": "5", "labels": labels}
        world.cache.put("Pod", {"metadata": {**metadata, "creationTimestamp": created}, "spec": {"containers": []}})
    world.own("uid-2", created="2026-02-01T00:00:00Z")
    await world.cluster.apply_plan(world.plan())
    assert [pod["metadata"]["name"] for pod in world.cluster.snapshot(KEY).pods] == ["skewed", "new"]


@pytest.mark.parametrize("kind", ["NetworkPolicy", "Secret", "ConfigMap"])
async def test_no_pod_starts_before_its_network_policy_and_configuration_exist(world: World, kind: str) -> None:
    error = ApiError(403, "Forbidden", "denied")
    world.api.report_invalid = lambda child: error if child["kind"] == kind else None
    await world.cluster.apply_plan(world.plan())
    assert "apply Deployment" not in world.take()
    world.api.report_invalid = lambda child: None
    await world.cluster.apply_plan(world.plan())
    assert "apply Deployment" in world.take()


async def test_an_object_of_another_owner_without_conflicting_fields_is_not_taken_over(world: World) -> None:
    theirs = {"kind": "ConfigMap", "metadata": {"namespace": "default", "labels": {"app": "theirs"}}}
    await world.settle(world.plan())
    ours = world.get("ConfigMap")
    world.remove("ConfigMap")
    theirs["metadata"] |= {"name": ours["metadata"]["name"], "uid": "x", "resourceVersion": "1"}  # type: ignore[operator]
    world.api.objects["ConfigMap", ours["metadata"]["name"]] = {**theirs, "data": ours["data"]}
    await world.cluster.apply_plan(world.plan())
    fault = world.cluster.observe(KEY).fault
    assert fault is not None
    assert fault.reason == "NameTaken"
    assert world.get("ConfigMap")["metadata"]["labels"] == {"app": "theirs"}


async def test_serving_replicas_follow_the_scale_while_another_model_is_loaded(world: World) -> None:
    await world.settle(world.plan())
    world.take()
    await world.cluster.apply_plan(world.cached(replicas=3))
    assert "merge Deployment" in world.take()
    assert world.get("Deployment")["spec"]["replicas"] == 3
    await world.settle(world.cached(replicas=3))
    assert "merge Deployment" not in world.take()
    world.change("Job", status=COMPLETE)
    await world.settle(world.cached(replicas=3))
    assert "apply Deployment" in world.take()


async def test_before_replicas_are_removed_the_emptiest_gets_the_lowest_deletion_cost(world: World) -> None:
    await world.settle(world.plan(replicas=3))
    world.run_pods(a=4, b=1, c=9)
    world.take()
    await world.settle(world.plan(replicas=2))
    assert world.take() == ["merge Pod", "apply Deployment"]
    assert world.api.objects["Pod", "b"]["metadata"]["annotations"][COST_ANNOTATION] == "-1"
    await world.settle(world.plan(replicas=4))
    assert world.take() == ["apply Deployment"], "without a removal, no deletion cost may be written"


async def test_a_changed_list_of_adapters_is_renewed_in_running_pods_at_once(world: World) -> None:
    plan = world.plan(engine={"lora": {}})
    await world.settle(plan)
    world.run_pods(a=4, b=1)
    world.take()
    await world.settle(plan)
    assert world.take() == [], "pods are annotated only when a list that they have changes"
    listed = replace(plan, adapters=(WantedAdapter(name="sql", source="hf://a/b"),))
    await world.settle(listed)
    assert world.take() == ["apply ConfigMap", "merge Pod", "merge Pod"]
    notes = [world.api.objects["Pod", name]["metadata"]["annotations"] for name in ("a", "b")]
    list_of_adapters = world.api.objects["ConfigMap", "chat-adapters"]["metadata"]["annotations"]
    assert {each[ADAPTERS_ANNOTATION] for each in notes} == {list_of_adapters[DIGEST_ANNOTATION]}
    world.api.report_invalid = lambda child: ApiError(403, "Forbidden", "no") if child["kind"] == "Pod" else None
    await world.settle(plan)
    assert world.take() == ["apply ConfigMap", "merge Pod", "merge Pod"], "a failed hint is not repeated"
    assert world.cluster.observe(KEY).fault is None


async def test_pods_of_a_large_model_are_renewed_a_few_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = world.plan(engine={"lora": {}})
    await world.settle(plan)
    world.run_pods(**{f"pod-{number}": 1 for number in range(3 * MOST_NOTES)})
    await world.settle(plan)
    merge, now, most = world.api.merge, 0, 0

    async def counted(*given: Any) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(3):
            await asyncio.sleep(0)
        now -= 1
        return await merge(*given)

    monkeypatch.setattr(world.api, "merge", counted)
    world.take()
    await world.settle(replace(plan, adapters=(WantedAdapter(name="sql", source="hf://a/b"),)))
    assert world.take().count("merge Pod") == 3 * MOST_NOTES
    assert most == MOST_NOTES


async def test_a_failed_write_of_a_deletion_cost_delays_nothing(world: World) -> None:
    await world.settle(world.plan(replicas=2))
    world.run_pods(a=4, b=1)
    world.api.report_invalid = lambda child: ApiError(403, "Forbidden", "no") if child["kind"] == "Pod" else None
    world.take()
    await world.settle(world.plan(replicas=1))
    assert world.take()[:2] == ["merge Pod", "apply Deployment"]
    assert world.cluster.observe(KEY).fault is None
