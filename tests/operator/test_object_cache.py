"""The caches: the deployments that a change affects, the stored fields, and the effect of a listing."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill_operator.controller.watching.cache import ObjectCache

Manifest = dict[str, Any]
GATEWAY = {"app.kubernetes.io/name": "pagemill", "app.kubernetes.io/component": "gateway"}
NAMESPACE = "pagemill-system"


@pytest.fixture
def cache() -> ObjectCache:
    return ObjectCache(NAMESPACE, GATEWAY)


def owner(name: str = "chat", *, version: int = 1, namespace: str = "default", **changes: Any) -> Manifest:
    spec = changes.pop("spec", {"model": {"source": "s"}})
    status = changes.pop("status", {})
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        **changes,
    }
    return {"metadata": metadata, "spec": spec, "status": status}


def child(owner_name: str = "chat", name: str = "chat-engine", *, version: int = 1, **content: Any) -> Manifest:
    labels = {"pagemill.dev/deployment": owner_name}
    metadata = {"name": name, "namespace": "default", "uid": "u", "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata, **content}


def gateway(name: str, *, ready: bool, version: int = 1) -> Manifest:
    metadata = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": name,
        "resourceVersion": str(version),
        "labels": {**GATEWAY, "pod-template-hash": "x"},
    }
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"metadata": metadata, "spec": {"containers": []}, "status": {"conditions": conditions, "podIP": "10.0.0.1"}}


def test_a_new_deployment_triggers_its_own_reconcile(cache: ObjectCache) -> None:
    assert cache.put("LLMDeployment", owner()) == {"default/chat"}
    assert cache.keys() == ["default/chat"]


def test_our_own_status_writes_trigger_no_reconcile(cache: ObjectCache) -> None:
    cache.put("LLMDeployment", owner())
    assert cache.put("LLMDeployment", owner(version=2, status={"replicas": 1})) == set()
    known = cache.owner("default/chat")
    assert known is not None
    assert known["status"] == {"replicas": 1}


def test_an_edit_triggers_the_reconcile_of_its_deployment(cache: ObjectCache) -> None:
    cache.put("LLMDeployment", owner())
    edited = owner(version=2, generation=2, spec={"model": {"source": "other"}})
    assert cache.put("LLMDeployment", edited) == {"default/chat"}


def test_an_older_version_of_an_object_is_ignored(cache: ObjectCache) -> None:
    cache.put("Deployment", child(version=10, spec={"replicas": 3}))
    assert cache.put("Deployment", child(version=9, spec={"replicas": 1})) == set()
    assert cache.children("default/chat")[("Deployment", "chat-engine")]["spec"] == {"replicas": 3}


def test_a_late_event_of_an_earlier_object_of_the_same_name_is_ignored(cache: ObjectCache) -> None:
    cache.put("LLMDeployment", owner(version=10, uid="new"))
    assert cache.put("LLMDeployment", owner(version=9, uid="old")) == set()
    known = cache.owner("default/chat")
    assert known is not None
    assert known["metadata"]["uid"] == "new"


def test_the_event_of_our_own_write_triggers_no_reconcile(cache: ObjectCache) -> None:
    written = child(version=10, spec={"replicas": 3})
    assert cache.put("Deployment", written) == {"default/chat"}
    assert cache.put("Deployment", {**written, "kind": "Deployment", "apiVersion": "apps/v1"}) == set()


def test_a_new_version_without_changes_triggers_no_reconcile(cache: ObjectCache) -> None:
    cache.put("Deployment", child(version=1, spec={"replicas": 3}))
    noisy = child(version=2, spec={"replicas": 3})
    noisy["metadata"]["managedFields"] = [{"time": "now"}]
    assert cache.put("Deployment", noisy) == set()


def test_a_changed_or_deleted_child_triggers_the_reconcile_of_its_owner(cache: ObjectCache) -> None:
    cache.put("Service", child())
    assert cache.put("Service", child(version=2, spec={"ports": []})) == {"default/chat"}
    assert cache.remove("Service", "default", "chat-engine") == {"default/chat"}
    assert cache.children("default/chat") == {}


def test_the_deletion_of_an_object_of_the_same_name_does_not_remove_the_new_one(cache: ObjectCache) -> None:
    cache.put("Service", child())
    assert cache.remove("Service", "default", "chat-engine", uid="another") == set()
    assert ("Service", "chat-engine") in cache.children("default/chat")


def test_pods_are_sorted_by_age_and_are_not_children(cache: ObjectCache) -> None:
    for number, name in enumerate(["b", "a"]):
        pod = child(name=name, spec={"containers": [{"name": "engine", "env": ["x"]}]}, status={"phase": "Running"})
        pod["metadata"] |= {"creationTimestamp": f"2026-01-0{2 - number}T00:00:00Z", "uid": name}
        cache.put("Pod", pod)
    assert [pod["metadata"]["name"] for pod in cache.pods("default/chat")] == ["a", "b"]
    assert cache.children("default/chat") == {}
    assert "env" not in str(cache.pods("default/chat")), "only the fields that are read may be kept"


def test_objects_that_a_listing_does_not_contain_are_removed(cache: ObjectCache) -> None:
    for name in ("a", "b"):
        cache.put("Service", child(owner_name=name, name=f"{name}-engine"))
    assert cache.listed("Service", "", {("default", "a-engine")}) == {"default/b"}
    assert cache.children("default/b") == {}
    assert cache.listed("Service", "elsewhere", set()) == set(), "a listing of one namespace must not affect others"
    assert cache.listed("Service", "default", set()) == {"default/a"}


def test_all_deployments_are_reconciled_when_the_first_gateway_becomes_or_the_last_stops_being_ready(
    cache: ObjectCache,
) -> None:
    cache.put("LLMDeployment", owner("a"))
    cache.put("LLMDeployment", owner("b"))
    everybody = {"default/a", "default/b"}
    assert cache.put("Pod", gateway("g1", ready=False)) == set()
    assert cache.put("Pod", gateway("g1", ready=True, version=2)) == everybody
    assert cache.put("Pod", gateway("g2", ready=True)) == set()
    assert cache.num_gateways_ready() == 2
    assert cache.remove("Pod", NAMESPACE, "g1") == set()
    assert cache.put("Pod", gateway("g2", ready=False, version=2)) == everybody
    assert len(cache.gateways()) == 1


def test_only_the_releases_own_pods_are_gateways(cache: ObjectCache) -> None:
    stranger = gateway("g1", ready=True)
    stranger["metadata"]["namespace"] = "default"
    cache.put("Pod", stranger)
    assert cache.gateways() == []


def test_deployments_of_other_namespaces_are_not_served() -> None:
    cache = ObjectCache(NAMESPACE, GATEWAY, ["team-a"])
    assert cache.put("LLMDeployment", owner(namespace="team-b")) == set()
    assert cache.put("LLMDeployment", owner(namespace="team-a")) == {"team-a/chat"}
    assert cache.keys() == ["team-a/chat"]


def test_a_name_belongs_to_the_oldest_deployment_and_passes_to_the_next_one(cache: ObjectCache) -> None:
    cache.put("LLMDeployment", owner("old", spec={"model": {"name": "m"}}))
    younger = owner("young", spec={"model": {"name": "m"}}, creationTimestamp="2026-02-01T00:00:00Z")
    assert cache.put("LLMDeployment", younger) == {"default/young"}
    assert cache.conflict("default/old") is None
    assert "default/old" in str(cache.conflict("default/young"))
    assert cache.remove("LLMDeployment", "default", "old") == {"default/old", "default/young"}
    assert cache.conflict("default/young") is None


def test_an_older_deployment_that_appears_later_takes_the_name(cache: ObjectCache) -> None:
    cache.put("LLMDeployment", owner("young", creationTimestamp="2026-02-01T00:00:00Z", spec={"model": {"name": "m"}}))
    woken = cache.put("LLMDeployment", owner("old", spec={"model": {"name": "m"}}))
    assert woken == {"default/old", "default/young"}
    assert cache.conflict("default/young") is not None


def test_a_deployment_that_is_being_deleted_has_no_name(cache: ObjectCache) -> None:
    cache.put("LLMDeployment", owner("old", spec={"model": {"name": "m"}}))
    cache.put("LLMDeployment", owner("young", creationTimestamp="2026-02-01T00:00:00Z", spec={"model": {"name": "m"}}))
    going = owner("old", version=2, deletionTimestamp="2026-03-01T00:00:00Z", spec={"model": {"name": "m"}})
    assert cache.put("LLMDeployment", going) == {"default/old", "default/young"}
    assert cache.conflict("default/young") is None


def test_with_weights_on_both_sides_a_name_is_shared(cache: ObjectCache) -> None:
    for number, name in enumerate(["a", "b"], 1):
        spec = {"model": {"name": "m"}, "routing": {"weight": 50}}
        cache.put("LLMDeployment", owner(name, creationTimestamp=f"2026-01-0{number}T00:00:00Z", spec=spec))
    assert cache.conflict("default/b") is None


def autoscaler(target: str, *, version: int = 1, kind: str = "LLMDeployment", **status: Any) -> Manifest:
    metadata = {"name": "hpa", "namespace": "default", "uid": "hpa", "resourceVersion": str(version)}
    reference = {"apiVersion": "pagemill.dev/v1beta1", "kind": kind, "name": target}
    return {"metadata": metadata, "spec": {"scaleTargetRef": reference, "maxReplicas": 3}, "status": status}


def test_an_autoscaler_concerns_the_deployment_that_it_scales_and_is_no_child(cache: ObjectCache) -> None:
    cache.put("LLMDeployment", owner())
    kind = "HorizontalPodAutoscaler"
    assert cache.put(kind, autoscaler("chat", kind="Deployment")) == set()
    assert cache.put(kind, autoscaler("chat", version=2)) == {"default/chat"}
    assert cache.put(kind, autoscaler("chat", version=3, currentReplicas=2)) == set(), "its status changes constantly"
    assert cache.autoscalers("default/chat") == ("hpa",)
    assert cache.children("default/chat") == {}
    assert cache.put(kind, autoscaler("other", version=4)) == {"default/chat", "default/other"}
    assert cache.autoscalers("default/chat") == ()
    assert cache.remove(kind, "default", "hpa") == {"default/other"}
