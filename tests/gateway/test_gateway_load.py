"""What the operator reads of the load: together per deployment, on change, and only for those with the token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pagemill_gateway.brain.load import measure_load
from pagemill_gateway.brain.queues import Queues
from pagemill_gateway.brain.registry import Registry
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.state import EngineLoad, StateFrame


def nobody_waits() -> Queues:
    return Queues(lambda: 0.0, lambda _: True)


def registry_with(*loads: EngineLoad | None) -> Registry:
    registry = Registry(stale_after_s=3.0, ejection_base_s=1.0, ejection_max_s=1.0)
    endpoints = [
        Endpoint(id=str(index), data_url=f"http://e{index}:1", control_url=f"http://e{index}:2")
        for index in range(len(loads))
    ]
    registry.apply(Catalog(models=[CatalogModel(namespace="ns", deployment="d", name="m", endpoints=endpoints)]), 0.0)
    for index, load in enumerate(loads):
        if load is not None:
            frame = StateFrame(sequence=1, snapshot=True, max_model_len=10, load=load)
            registry.endpoints[str(index)].reports.accept(frame, 0, 100.0 + index)
    return registry


def test_loads_of_all_engines_are_added_up() -> None:
    one = EngineLoad(num_blocks_total=100, num_blocks_active=50, num_requests_running=2, num_requests_waiting=1)
    two = EngineLoad(num_blocks_total=300, num_blocks_active=50, num_requests_running=3)
    (load,) = measure_load(registry_with(one, two, None), nobody_waits(), now=102.0)
    assert (load.namespace, load.name, load.ready) == ("ns", "d", 2)
    assert (load.kv_cache_usage, load.running, load.waiting) == (0.25, 5, 1)
    assert load.age_s == 2.0


def test_old_reports_do_not_count() -> None:
    one, two = EngineLoad(num_blocks_total=10, num_blocks_active=10), EngineLoad(num_blocks_total=10)
    (load,) = measure_load(registry_with(one, two), nobody_waits(), now=103.5)
    assert (load.kv_cache_usage, load.age_s) == (0.0, 2.5)
    (load,) = measure_load(registry_with(one, two), nobody_waits(), now=200.0)
    assert (load.kv_cache_usage, load.running, load.age_s) == (None, 0, None)


@asynccontextmanager
async def reading(gateway: Any, token: str) -> AsyncIterator[Any]:
    headers = {"Authorization": f"Bearer {token}"}
    async with gateway.session.get(gateway.control_url + "/internal/load", headers=headers) as response:
        yield response


async def line_of(response: Any) -> Any:
    async with asyncio.timeout(5):
        (entry,) = json.loads(await response.content.readline())["deployments"]
        return entry


async def test_changes_are_told_as_they_happen(engines, gateways) -> None:
    gateway = await gateways(*engines[:2], control_token="t0ken")
    async with reading(gateway, "t0ken") as response:
        assert response.status == 200
        first = await line_of(response)
        assert (first["namespace"], first["name"], first["ready"]) == ("default", "d", 2)
        assert first["kv_cache_usage"] is None
        load = EngineLoad(num_blocks_total=10, num_blocks_active=5, num_requests_running=4)
        await engines[0].push_state(load=load)
        second = await line_of(response)
        assert (second["kv_cache_usage"], second["running"]) == (0.5, 4)


async def test_only_the_control_token_opens_it(engines, gateways) -> None:
    gateway = await gateways(engines[0], control_token="t0ken")
    async with reading(gateway, "wrong") as response:
        assert response.status == 401


async def test_the_stream_ends_with_the_gateway(engines, gateways) -> None:
    gateway = await gateways(engines[0], control_token="t0ken")
    async with reading(gateway, "t0ken") as response:
        await line_of(response)
        gateway.gateway.closing.set()
        async with asyncio.timeout(5):
            while await response.content.readline():
                pass
