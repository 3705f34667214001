"""The load that the operator reads: totals for each deployment, sent on change, and only with the token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from load_stream import load_frames
from waiting import WAIT_LIMIT_S

from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.frames import StateDecoder, encode_state
from pagemill_protocol.report.load import DeploymentLoad, EngineReport, EngineStart
from pagemill_protocol.report.state import EngineLoad, SlowRank, StateFrame, StepTimeParams
from pagemill_protocol.request.sampling import LOW_PRIORITY
from pagemill_protocol.resource.served import QueueLimits
from pagemill_protocol.versions import protocol_headers
from pagemill_routing.brain.endpoints.pod_reports import read_report
from pagemill_routing.brain.endpoints.registry import Registry
from pagemill_routing.brain.load.measure import measure_load
from pagemill_routing.brain.load.traffic import TrafficMeter
from pagemill_routing.brain.queue.queues import Queues


def registry_with(*loads: EngineLoad | None) -> Registry:
    registry = Registry(stale_after_s=3.0)
    endpoints = [
        Endpoint(id=str(index), data_url=f"http://e{index}:1", control_url=f"http://e{index}:2")
        for index in range(len(loads))
    ]
    registry.apply(Catalog(models=[CatalogModel(namespace="ns", deployment="d", name="m", endpoints=endpoints)]), 0.0)
    for index, load in enumerate(loads):
        if load is not None:
            step_time = StepTimeParams(num_steps_observed=index)
            frame = StateFrame(sequence=1, snapshot=True, max_model_len=10, load=load, step_time=step_time)
            registry.endpoints[str(index)].reports.accept(frame, 0, 100.0 + index)
    return registry


def measured(registry: Registry, now: float, policies: Sequence[str] = ()) -> DeploymentLoad:
    (load,) = measure_load(registry, Queues(lambda: 0.0, lambda _: True), TrafficMeter(lambda: now), [*policies], now)
    return load


def test_loads_of_all_engines_are_added_up() -> None:
    one = EngineLoad(num_kv_bytes_total=100, num_kv_bytes_active=50, num_requests_running=2, num_requests_waiting=1)
    two = EngineLoad(num_kv_bytes_total=300, num_kv_bytes_active=50, num_requests_running=3, num_kv_bytes_evictable=200)
    load = measured(registry_with(one, two, None), now=102.0)
    engines = load.engines
    assert (load.key, load.pods.ready, load.pods.loading) == ("ns/d", 2, 1)
    assert (engines.num_kv_bytes_active, engines.num_kv_bytes_total) == (100, 400), "cached blocks are not active"
    assert (engines.num_requests_running, engines.num_requests_waiting) == (5, 1)
    assert (engines.truth, engines.age_s, engines.num_reporting) == ("value", 2.0, 2)
    assert engines.step_time.num_steps_observed == 1


def test_step_times_of_engines_are_compared_with_the_one_that_has_observed_most() -> None:
    registry = registry_with(*[EngineLoad(num_kv_bytes_total=10)] * 3, None)
    for index, slowness in enumerate((1.6, 1.0, 0.5)):
        params = StepTimeParams([1, 512], [10.0 * slowness, 90.0 * slowness], num_steps_observed=7 if index == 1 else 1)
        frame = StateFrame(sequence=1, snapshot=True, max_model_len=10, step_time=params)
        record = registry.endpoints[str(index)]
        record.reports.accept(frame, 0, 102.0)
        record.pod_report = read_report(frame, None, None)
    engines = measured(registry, now=102.0).engines
    assert engines.step_time.knot_ms == [10.0, 90.0]
    assert engines.step_time_ratios == pytest.approx((0.5, 1.0, 1.6))


@pytest.mark.parametrize(
    ("now", "truth", "num_reporting"), [(101.5, "value", 2), (103.5, "stale", 1), (200, "stale", 0)]
)
def test_old_reports_are_stale_and_do_not_count_as_zero(now: float, truth: str, num_reporting: int) -> None:
    load = EngineLoad(num_kv_bytes_total=10, num_kv_bytes_active=10)
    engines = measured(registry_with(load, load), now).engines
    assert (engines.truth, engines.num_reporting, engines.num_kv_bytes_total) == (
        truth,
        num_reporting,
        10 * num_reporting,
    )


def test_an_engine_without_reports_is_unknown_and_no_engine_is_a_zero() -> None:
    assert measured(registry_with(None), 100.0).engines.truth == "unknown"
    assert measured(registry_with(), 100.0).engines.truth == "value"


def test_silent_engines_that_are_draining_make_the_load_not_unknown() -> None:
    registry = registry_with(EngineLoad(num_kv_bytes_total=10), None)
    for record in registry.endpoints.values():
        record.draining = True
    assert measured(registry, 200.0).engines.truth == "value", "both engines were draining"


def test_the_load_of_each_engine_is_reported_by_its_id() -> None:
    one = EngineLoad(num_kv_bytes_total=9, num_kv_bytes_active=5, num_requests_running=2, num_requests_waiting=1)
    two = EngineLoad(num_kv_bytes_active=1)
    registry = registry_with(one, two, None)
    registry.endpoints["1"].in_flight = 4
    load = measured(registry, 102.0)
    assert load.replicas == [EngineReport("0", one), EngineReport("1", two, 4)], "engines without reports do not count"
    assert [each.num_requests for each in load.replicas] == [3, 4], "requests that were just sent count"
    assert measured(registry, 103.5).replicas == load.replicas[1:]


def test_settings_without_effect_are_those_of_any_engine() -> None:
    registry = registry_with(EngineLoad(), EngineLoad(), None)
    for index, names in enumerate((["chat_template"], ["tool_call_parser", "chat_template"])):
        frame = StateFrame(sequence=2, snapshot=True, max_model_len=10, unused_settings=names)
        registry.endpoints[str(index)].reports.accept(frame, 0, 102.0)
    assert measured(registry, now=102.0).unused_settings == ["chat_template", "tool_call_parser"]


def test_a_slow_rank_is_reported_with_its_engine() -> None:
    registry, slow = registry_with(EngineLoad(), EngineLoad(), None), SlowRank(1, 1, 41.5, 13.0)
    frame = StateFrame(sequence=2, snapshot=True, max_model_len=10, slow_rank=slow)
    (decoded,) = StateDecoder().feed(encode_state(frame))
    registry.endpoints["1"].reports.accept(decoded, 0, 102.0)
    assert [each.slow_rank for each in measured(registry, now=102.0).replicas] == [None, slow]


def test_a_gateway_names_its_policies_where_it_lacks_the_deployments() -> None:
    registry = registry_with(EngineLoad())
    assert measured(registry, 102.0, ["Auto", "Cost"]).routing_policies == []
    assert measured(registry, 102.0, ["Cost"]).routing_policies == ["Cost"], "the deployment asks for Auto"


def test_start_times_of_each_engine_are_reported_by_its_id() -> None:
    registry = registry_with(EngineLoad(), EngineLoad())
    frame = StateFrame(sequence=2, snapshot=True, max_model_len=10, start_s={"load": 2.5})
    registry.endpoints["1"].reports.accept(frame, 0, 101.0)
    assert measured(registry, 102.0).starts == [EngineStart("1", {"load": 2.5})], "the other engine has not reported"


@asynccontextmanager
async def reading(gateway: Any, token: str) -> AsyncIterator[Any]:
    headers = {"Authorization": f"Bearer {token}", **protocol_headers()}
    async with gateway.session.get(gateway.control_url + "/internal/load", headers=headers) as response:
        yield response


async def ask(gateway: Any) -> Any:
    """Return a stream that has begun."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    return await gateway.session.post(gateway.url + "/v1/chat/completions", json=body)


async def test_changes_are_reported_as_they_happen(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2])
    async with reading(gateway, "t0ken") as response:
        assert response.status == 200
        frames = load_frames(response)
        first = await anext(frames)
        (load,) = first.deployments
        assert (load.key, load.pods.ready, load.engines.num_kv_bytes_total) == ("default/d", 2, 0)
        await engines[0].push_state(
            load=EngineLoad(num_kv_bytes_total=10, num_kv_bytes_active=5, num_requests_running=4)
        )
        number = first.sequence
        while not load.engines.num_kv_bytes_total:
            frame = await anext(frames)
            (load,) = frame.deployments
            assert frame.sequence == number + 1
            number = frame.sequence
        assert (load.engines.num_kv_bytes_active, load.engines.num_requests_running) == (5, 4)


async def test_requests_are_reported_with_their_rate_latency_and_lengths(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    for stream in (True, True, False):
        assert (await gateway.chat(stream=stream)).status == 200
    async with reading(gateway, "t0ken") as response:
        (load,) = (await anext(load_frames(response))).deployments
    assert load.arrivals.requests_per_s * load.arrivals.window_s == pytest.approx(3, abs=0.1)
    assert load.arrivals.tokens_per_s > 0
    assert load.latencies.ttft_ms.total == 2, "only streams have a latency"
    assert load.lengths.output.total == 3


async def test_requests_that_give_way_require_no_additional_engine(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    for priority in (0, LOW_PRIORITY, LOW_PRIORITY):
        assert (await gateway.chat(stream=True, priority=priority)).status == 200
    async with reading(gateway, "t0ken") as response:
        (load,) = (await anext(load_frames(response))).deployments
    assert load.arrivals.requests_per_s * load.arrivals.window_s == pytest.approx(1, abs=0.1)
    assert (load.latencies.ttft_ms.total, load.lengths.output.total) == (1, 1)


async def test_a_request_that_waits_for_an_engine_is_reported_at_once_and_served_when_it_comes(
    engines, gateways, fake
) -> None:
    await engines[0].kill()
    queue = QueueLimits(max_requests=10, max_bytes=10**6, timeout_s=60.0)
    empty = fake.catalog_of(wakes=True, queue=queue)
    gateway = await gateways(catalog=empty, keep_alive_interval_s=0.05)
    async with reading(gateway, "t0ken") as response:
        frames = load_frames(response)
        (load,) = (await anext(frames)).deployments
        assert (load.engines.truth, load.queue.num_requests) == ("value", 0)
        waiting = asyncio.create_task(ask(gateway))
        while not load.queue.needs_engine:
            (load,) = (await anext(frames)).deployments
        assert load.queue.num_requests == 1
        assert load.queue.num_tokens > 0, "a third of its bytes"
        assert load.arrivals.requests_per_s > 0, "the request must count before an engine exists"
    async with await waiting as answer:
        assert (await answer.content.readline()).startswith(b": waiting")
        await engines[0].start()
        gateway.gateway.control.apply_catalog(fake.catalog_of(engines[0], wakes=True, queue=queue))
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_a_queue_without_an_engine_has_a_time_limit(engines, gateways, fake) -> None:
    queue = QueueLimits(max_requests=10, max_bytes=10**6, timeout_s=0.2)
    gateway = await gateways(catalog=fake.catalog_of(wakes=True, queue=queue))
    reply = await gateway.chat()
    assert reply.status == 503
    assert "retry-after" in reply.headers


async def test_the_load_stream_requires_the_control_token(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    async with reading(gateway, "wrong") as response:
        assert response.status == 401


async def test_a_head_request_starts_no_stream(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    async with asyncio.timeout(WAIT_LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.control_url.rpartition(":")[2]))
        common = b"Host: gateway\r\nAuthorization: Bearer t0ken\r\n\r\n"
        writer.write(b"HEAD /internal/load HTTP/1.1\r\n" + common)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"GET /version HTTP/1.1\r\n" + common)
        assert b'{"version"' in await reader.readuntil(b"}"), "the connection must be free for other requests"
        writer.close()


async def test_the_stream_ends_with_the_gateway(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    async with reading(gateway, "t0ken") as response:
        await response.content.readany()
        gateway.gateway.control.closing.set()
        async with asyncio.timeout(WAIT_LIMIT_S):
            while await response.content.readany():
                pass
