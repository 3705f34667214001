"""Clients of a deployment without capacity wait in turn, receive comments, or are refused with a Retry-After."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from typing import Any

import openai
import pytest
from load_stream import load_frames
from waiting import SOON_S

from pagemill_protocol.report.load import QueueLoad
from pagemill_protocol.resource.served import QueueLimits
from pagemill_protocol.versions import protocol_headers

DEPLOYMENT = "default/d"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def limits(max_requests: int = 1000, max_bytes: int = 10**8, timeout_s: float = 60.0) -> QueueLimits:
    return QueueLimits(max_requests=max_requests, max_bytes=max_bytes, timeout_s=timeout_s)


def num_waiting(gateway: Any) -> int:
    return gateway.gateway.control.brain.queues.state(DEPLOYMENT).num_requests


async def busy(gateway: Any, engine: Any, fake: Any) -> tuple[asyncio.Task[Any], asyncio.Event]:
    """Start a request that occupies the engine's only slot until the event is set."""
    release = asyncio.Event()
    engine.behaviours.append(fake.says("first", gate=release))
    task = asyncio.create_task(gateway.chat(stream=True))
    await fake.until(lambda: gateway.record(engine).in_flight == 1)
    return task, release


async def one_slot(engines: Any, gateways: Any, **settings: Any) -> Any:
    engines[0].max_num_seqs = 1
    return await gateways(engines[0], **settings)


@pytest.mark.layouts
async def test_a_hundred_concurrent_clients_are_served_and_no_engine_exceeds_its_slots(engines, gateways, fake) -> None:
    async def takes_its_time(engine, request, response, http) -> None:
        await response.prepare(http)
        await asyncio.sleep(0.3)
        for frame in fake.answer_frames(request, ("a", "b")):
            await response.write(frame)
        await response.write_eof()

    for engine in engines:
        engine.max_num_seqs = 8
        engine.behaviour = takes_its_time
    gateway = await gateways(*engines)
    replies = await asyncio.gather(*(gateway.chat(stream=number % 2 == 0) for number in range(100)))
    assert {reply.status for reply in replies} == {200}
    assert sum(len(engine.requests) for engine in engines) == 100, "no request may be served twice"
    assert max(engine.most_inside for engine in engines) <= 8
    await fake.until(lambda: not any(gateway.record(engine).reserved.num_bytes for engine in engines))


@pytest.mark.layouts
async def test_a_streaming_client_gets_comments_while_it_waits(engines, gateways, fake, caplog) -> None:
    gateway = await one_slot(engines, gateways, keep_alive_interval_s=0.05)
    first, release = await busy(gateway, engines[0], fake)
    with caplog.at_level("INFO", logger="pagemill.gateway.access"):
        async with gateway.session.post(gateway.url + "/v1/chat/completions", json=BODY | {"stream": True}) as response:
            assert response.status == 200
            for _ in range(2):
                assert (await response.content.readline()).startswith(b": waiting")
                assert await response.content.readline() == b"\n"
            release.set()
            rest = await response.read()
        await fake.until(lambda: '"queued_ms"' in caplog.text)
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b"hello" in rest
    assert (await first).streamed_text == "first"


async def test_a_client_of_anthropics_api_gets_its_own_event_while_it_waits(engines, gateways, fake) -> None:
    gateway = await one_slot(engines, gateways, keep_alive_interval_s=0.02)
    _, release = await busy(gateway, engines[0], fake)
    body = {**BODY, "max_tokens": 9, "stream": True}
    async with gateway.session.post(gateway.url + "/v1/messages", json=body) as response:
        for _ in range(2):
            assert await response.content.readline() == b"event: ping\n"
            assert json.loads((await response.content.readline()).removeprefix(b"data: ")) == {"type": "ping"}
            assert await response.content.readline() == b"\n"
        release.set()
        rest = await response.read()
    assert b": waiting" not in rest
    assert b"event: message_start" in rest
    assert rest.endswith(b"\n\n")


@pytest.mark.slow
async def test_anthropics_client_ignores_these_events(engines, gateways, fake) -> None:
    import anthropic  # it takes 0.6 s, which only the worker that runs the test spends

    gateway = await one_slot(engines, gateways, keep_alive_interval_s=0.02)
    _, release = await busy(gateway, engines[0], fake)
    client = anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0)
    async with client, client.messages.stream(**BODY, max_tokens=9) as stream:
        release.set()
        assert "".join([text async for text in stream.text_stream]) == "hello world"


async def test_the_openai_client_ignores_the_comments(engines, gateways, fake) -> None:
    gateway = await one_slot(engines, gateways, keep_alive_interval_s=0.02)
    _, release = await busy(gateway, engines[0], fake)
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(**BODY, stream=True)
        release.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello world"


async def test_a_client_that_does_not_stream_gets_nothing_while_it_waits(engines, gateways, fake) -> None:
    gateway = await one_slot(engines, gateways, keep_alive_interval_s=0.02)
    _, release = await busy(gateway, engines[0], fake)
    waiting = asyncio.create_task(gateway.chat())
    await fake.until(lambda: num_waiting(gateway) == 1)
    await asyncio.sleep(0.1)
    release.set()
    reply = await waiting
    assert (reply.status, reply.text) == (200, "hello world")


async def test_a_refusal_after_the_first_comment_is_an_error_event(engines, gateways, fake) -> None:
    gateway = await one_slot(engines, gateways, keep_alive_interval_s=0.02, queue=limits(timeout_s=1.5))
    _, release = await busy(gateway, engines[0], fake)
    reply = await gateway.chat(stream=True)
    assert reply.status == 200
    comments, _, error = reply.raw.partition(b"data: ")
    assert comments.startswith(b": waiting")
    assert json.loads(error)["error"]["code"] == "server_is_overloaded"
    release.set()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_before_the_first_comment_has_its_own_status(engines, gateways, fake, stream) -> None:
    gateway = await one_slot(engines, gateways, queue=limits(max_requests=1, timeout_s=3.0))
    _, release = await busy(gateway, engines[0], fake)
    waiting = asyncio.create_task(gateway.chat(stream=stream))
    await fake.until(lambda: num_waiting(gateway) == 1)
    full = await gateway.chat(stream=stream)
    assert (full.status, full.error["code"]) == (429, "queue_full")
    late = await waiting
    assert (late.status, late.error["code"]) == (503, "server_is_overloaded")
    for reply in (full, late):
        assert 1 <= int(reply.headers["retry-after"]) <= 120
    release.set()


async def test_the_bytes_of_waiting_requests_are_limited(engines, gateways, fake) -> None:
    gateway = await one_slot(engines, gateways, queue=limits(max_bytes=1000))
    first, release = await busy(gateway, engines[0], fake)
    long = {"messages": [{"role": "user", "content": "x" * 900}]}
    assert (await gateway.chat(messages=[{"role": "user", "content": "x" * 1000}])).status == 429
    waiting = asyncio.create_task(gateway.chat(**long))
    await fake.until(lambda: num_waiting(gateway) == 1)
    assert (await gateway.chat(**long)).status == 429
    release.set()
    assert (await waiting).status == 200
    await first


@pytest.mark.layouts
async def test_a_client_that_leaves_the_queue_is_removed_at_once(engines, gateways, fake) -> None:
    gateway = await one_slot(engines, gateways, queue=limits(max_requests=1), keep_alive_interval_s=0.02)
    first, release = await busy(gateway, engines[0], fake)
    for stream in (False, True):
        waiting = asyncio.create_task(gateway.chat(stream=stream))
        await fake.until(lambda: num_waiting(gateway) == 1)
        left_s = time.monotonic()
        waiting.cancel()
        await fake.until(lambda: num_waiting(gateway) == 0)
        assert time.monotonic() - left_s < SOON_S, "not after the queue's 60 s"
    release.set()
    await first
    await fake.until(lambda: gateway.record(engines[0]).in_flight == 0)
    assert len(engines[0].requests) == 1
    assert gateway.record(engines[0]).reserved.num_bytes == 0


async def test_the_deadline_header_applies_in_the_queue(engines, gateways, fake) -> None:
    gateway = await one_slot(engines, gateways)
    _, release = await busy(gateway, engines[0], fake)
    reply = await gateway.chat(headers={"x-request-timeout-s": "0.3"})
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert len(engines[0].requests) == 1
    release.set()


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "", "1e9"])
async def test_an_invalid_deadline_is_refused_by_the_name_of_its_header(engines, gateways, fake, value) -> None:
    gateway = await gateways(engines[0])
    for reply in (
        await gateway.chat(headers={"x-request-timeout-s": value}),
        await gateway.complete(stream=True, headers={"x-request-timeout-s": value}),
    ):
        assert (reply.status, reply.error["param"]) == (400, "x-request-timeout-s")
    assert not engines[0].requests


@pytest.mark.layouts
async def test_a_deadline_applies_while_no_engine_exists(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], reconnect_base_s=0.01, outage_wait_s=3600.0)
    await engines[0].kill()
    await fake.until(lambda: gateway.record(engines[0]).unreachable)
    asked = [
        gateway.chat(headers={"x-request-timeout-s": "0.3"}),
        gateway.complete(prompt=["a", "b"], headers={"x-request-timeout-s": "0.3"}),
    ]
    for reply in await asyncio.gather(*asked):
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    await fake.until(lambda: num_waiting(gateway) == 0)


async def test_an_urgent_request_overtakes_waiting_requests(engines, gateways, fake) -> None:
    gateway = await one_slot(engines, gateways)
    first, release = await busy(gateway, engines[0], fake)
    noisy = [asyncio.create_task(gateway.chat(priority=1)) for _ in range(20)]
    await fake.until(lambda: num_waiting(gateway) == 20)
    urgent = asyncio.create_task(gateway.chat(priority=0))
    await fake.until(lambda: num_waiting(gateway) == 21)
    release.set()
    await urgent
    assert [request.priority for request in engines[0].requests].index(0, 1) == 1, (
        "the urgent request must get the slot first"
    )
    assert {(await task).status for task in noisy} == {200}
    await first


@pytest.mark.layouts
async def test_at_most_three_engines_are_tried_before_a_request_waits(engines, gateways, fake) -> None:
    more = [await fake.Engine(f"engine-{number}").start() for number in (3, 4)]
    everybody = [*engines, *more]
    asked: list[str] = []

    async def refuses_three_times(engine, request, response, http) -> None:
        asked.append(engine.name)
        behave = fake.refuses(503) if len(asked) <= 3 else fake.says("hello")
        await behave(engine, request, response, http)

    for engine in everybody:
        engine.behaviour = refuses_three_times
    gateway = await gateways(*everybody)
    reply = await gateway.chat()
    metrics = (await gateway.get("/metrics", control=True)).raw.decode()
    for engine in more:
        await engine.kill()
    assert (reply.status, reply.text) == (200, "hello")
    assert len(set(asked)) == len(asked) == 4
    assert 'pagemill_gateway_queue_seconds_count{model="tiny"} 1.0' in metrics, (
        "the request waits although two engines were never tried"
    )


@pytest.mark.layouts
async def test_the_requested_output_tokens_are_reserved(engines, gateways, fake) -> None:
    gateway, draining = await gateways(engines[0]), asyncio.Event()
    engines[0].behaviour = fake.says("a", "b", gate=draining)
    asked = [
        asyncio.create_task(gateway.chat(n=3, max_tokens=8, stream=True)),
        asyncio.create_task(gateway.complete(prompt=["x", "y"], n=2, max_tokens=8, stream=True)),
    ]
    reserved = gateway.record(engines[0]).reserved
    await fake.until(lambda: len(reserved) == 3)
    needs = sorted((each.need.num_sequences, each.need.num_output_tokens) for each in reserved._open.values())
    draining.set()
    assert needs == [(2, 8), (2, 8), (3, 8)]
    assert {(await each).status for each in asked} == {200}
    await fake.until(lambda: (reserved.num_sequences, reserved.num_bytes) == (0, 0))


@pytest.mark.layouts
async def test_the_queue_is_fair_between_api_keys(engines, gateways, fake) -> None:
    keys = [hashlib.sha256(key.encode()).hexdigest() for key in ("first", "noisy", "quiet")]
    catalog = fake.catalog_of(engines[0], prefix_scope="key")
    gateway = await one_slot(engines, gateways, api_keys=keys, catalog=catalog)
    release = asyncio.Event()
    engines[0].behaviours.append(fake.says("first", gate=release))

    def ask(key: str) -> asyncio.Task[Any]:
        return asyncio.create_task(gateway.chat(headers={"Authorization": f"Bearer {key}"}))

    tasks = [ask("first")]
    await fake.until(lambda: len(engines[0].requests) == 1)
    for key, count in (("noisy", 30), ("quiet", 3)):
        there = num_waiting(gateway)
        tasks += [ask(key) for _ in range(count)]
        await fake.until(
            lambda there=there, count=count: num_waiting(gateway) == there + count,
            progress=lambda: num_waiting(gateway),
        )
    release.set()
    assert {(await task).status for task in tasks} == {200}
    salts = [request.cache_salt for request in engines[0].requests]
    quiet = min(set(salts), key=lambda salt: (salt == salts[0], salts.count(salt)))
    assert salts.count(quiet) == 3
    assert {number for number, salt in enumerate(salts) if salt == quiet} <= set(range(1, 8)), (
        "every second turn goes to the other key"
    )


async def test_a_refusal_by_one_engine_is_not_visible_to_the_client(engines, gateways, fake) -> None:
    gateway = await gateways(*engines)
    for engine in engines:
        engine.behaviours.extend([fake.refuses(503), fake.refuses(429)])
    replies = await asyncio.gather(*(gateway.chat() for _ in range(4)))
    assert {reply.status for reply in replies} == {200}


async def test_a_streaming_client_gets_comments_while_no_engine_exists(engines, gateways, fake) -> None:
    gateway = await gateways(
        engines[0], reconnect_base_s=0.01, reconnect_max_s=0.05, outage_wait_s=30.0, keep_alive_interval_s=0.05
    )
    await engines[0].kill()
    await fake.until(lambda: gateway.record(engines[0]).unreachable)
    async with gateway.session.post(gateway.url + "/v1/chat/completions", json=BODY | {"stream": True}) as response:
        assert (await response.content.readline()).startswith(b": waiting")
        assert num_waiting(gateway) == 1
        await engines[0].start()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert num_waiting(gateway) == 0


@pytest.mark.layouts
async def test_a_queue_is_published_to_the_operator_at_once_and_in_metrics_and_status(engines, gateways, fake) -> None:
    gateway = await one_slot(engines, gateways)
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'pagemill_gateway_in_flight_requests{model="tiny"} 0.0' in text, "no traffic must be reported as zero"
    first, release = await busy(gateway, engines[0], fake)
    headers = {"Authorization": "Bearer t0ken", **protocol_headers()}
    async with gateway.session.get(gateway.control_url + "/internal/load", headers=headers) as response:
        frames = load_frames(response)
        load = (await anext(frames)).deployments[0]
        assert load.queue == QueueLoad()
        waiting = asyncio.create_task(gateway.chat())
        while not load.queue.num_requests:
            load = (await anext(frames)).deployments[0]
        assert load.queue.num_bytes > 0
        assert load.queue.oldest_s >= 0
        assert not load.queue.needs_engine
    status = (await gateway.get("/status", control=True)).json["models"][0]
    assert status["queue"]["num_requests"] == 1
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'pagemill_gateway_queue_requests{model="tiny"} 1.0' in text
    assert 'pagemill_gateway_in_flight_requests{model="tiny"} 2.0' in text, "waiting and running requests count"
    release.set()
    assert (await waiting).status == 200
    await first
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'pagemill_gateway_queue_requests{model="tiny"} 0.0' in text
    assert 'pagemill_gateway_queue_ended_total{model="tiny",outcome="served"} 1.0' in text
    assert 'pagemill_gateway_queue_seconds_count{model="tiny"} 1.0' in text


async def test_the_catalogue_sets_the_length_of_the_queue(engines, gateways, fake) -> None:
    catalog = fake.catalog_of(engines[0], queue=limits(max_requests=0))
    gateway = await one_slot(engines, gateways, catalog=catalog)
    _, release = await busy(gateway, engines[0], fake)
    asked_at = time.monotonic()
    assert (await gateway.chat()).status == 429
    assert time.monotonic() - asked_at < SOON_S, "the refusal must come at once, not after the timeout"
    release.set()
