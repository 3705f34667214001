"""Responses when engines misbehave, clients leave, or time runs out: a stream never ends without an error."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest

from pagemill_api.openai import render
from pagemill_protocol.errors import error_body, unavailable
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.request.generate import FrameMeta
from pagemill_protocol.resource.served import QueueLimits
from pagemill_routing.admission import reservations


def num_requests(engines) -> list[int]:
    return [len(engine.requests) for engine in engines]


def garbage_after_a_good_frame(fake):
    async def behave(engine, request, response, http) -> None:
        await response.prepare(http)
        await response.write(fake.answer_frames(request, ("a", "b"))[0])
        await asyncio.sleep(0.05)
        await response.write(b"\xff" * 64)
        await response.write_eof()

    return behave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        "dead",
        "refused 503",
        "refused 429",
        "error 500",
        "token",
        "html",
        "garbage",
        "cut",
        "other choice",
        "half event",
    ],
)
async def test_a_failure_before_the_first_byte_is_retried_on_another_engine(
    engines, gateways, fake, fault, stream
) -> None:
    gateway = await gateways(*engines[:2])
    bad, good = engines[:2]
    behaviours = {
        "refused 503": fake.refuses(503),
        "refused 429": fake.refuses(429),
        "error 500": fake.refuses(500),
        "token": fake.refuses(401),
        "html": fake.sends(b"<html>"),
        "garbage": fake.sends(b"\xff" * 100),
        "cut": fake.breaks_off(0),
        "other choice": fake.sends(encode_frame(FrameMeta(choice=9, token_ids=[1]), b"data: {}\n\n")),
        "half event": fake.sends(encode_frame(FrameMeta(token_ids=[1]), b"data: {}")),
    }
    if fault == "dead":
        await bad.kill()
    else:
        bad.behaviour = behaviours[fault]
    if fault == "half event" and not stream:
        bad.behaviour = fake.sends(encode_frame(FrameMeta(last=True), b"not json"))
    for _ in range(4):
        reply = await gateway.chat(stream=stream)
        assert reply.status == 200, reply.raw
        assert (reply.streamed_text if stream else reply.text) == "hello world"
    assert len(good.requests) == 4


async def test_a_beam_search_whose_engine_dies_is_restarted(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2])
    for engine in engines[:2]:
        engine.behaviours.append(fake.breaks_off(0))
    reply = await gateway.chat(use_beam_search=True, n=2, beam_width=4)
    assert reply.status == 200, reply.raw
    asked = [request for engine in engines[:2] for request in engine.requests]
    assert len(asked) == 3
    assert all(request.sampling == asked[0].sampling and not request.resume for request in asked)
    assert (asked[0].sampling.use_beam_search, asked[0].sampling.best_of) == (True, 4)


@pytest.mark.parametrize("num_frames", [0, 1, 2])
async def test_a_body_is_retried_however_much_of_it_had_arrived(engines, gateways, fake, num_frames) -> None:
    gateway = await gateways(*engines[:2])
    half = encode_frame(FrameMeta(token_ids=[1, 2]))
    for engine in engines[:2]:
        engine.behaviours.append(fake.sends(*[half] * num_frames))
    reply = await gateway.chat()
    assert (reply.status, reply.text) == (200, "hello world")
    assert sum(num_requests(engines)) == 3
    ids = [request.request_id for engine in engines[:2] for request in engine.requests]
    assert len(set(ids)) == 3, "a retry must not run together with its predecessor"
    assert all((request.response_id or request.request_id) == reply.json["id"]
               for engine in engines[:2] for request in engine.requests)  # fmt: skip


async def test_one_failed_prompt_of_several_ends_the_whole_stream_with_an_error(engines, gateways, fake) -> None:
    gateway = await gateways(*engines)
    engines[1].behaviour = fails_with(400, after=1, stream=True, fake=fake)
    reply = await gateway.complete(prompt=["a", "b", "c"], stream=True)
    assert reply.events[-1]["error"]["message"] == "engine says no"
    assert "[DONE]" not in reply.events


async def test_at_most_three_engines_are_tried_and_none_twice(engines, gateways, fake) -> None:
    fourth = await fake.Engine("engine-3").start()
    try:
        everybody = [*engines, fourth]
        gateway = await gateways(*everybody)
        for engine in everybody:
            engine.behaviour = fake.refuses(500)
        reply = await gateway.chat()
        assert (reply.status, reply.error["code"]) == (502, "bad_upstream")
        assert reply.headers["retry-after"] == "1"
        assert sorted(num_requests(everybody)) == [0, 1, 1, 1]
    finally:
        await fourth.kill()


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_that_died_unnoticed_cost_no_attempt(engines, gateways, fake, stream) -> None:
    """Their state streams continue, and nothing listens on their data ports."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    catalog = fake.catalog_of(*engines, routing_policy="RoundRobin")
    for index in (0, 1):
        catalog.models[0].endpoints[index] = msgspec.structs.replace(engines[index].endpoint, data_url=closed)
    gateway = await gateways(*engines, catalog=catalog, max_attempts=1)
    replies = [await gateway.chat(stream=stream) for _ in range(3)]
    assert [reply.status for reply in replies] == [200] * 3
    assert num_requests(engines) == [0, 0, 3]
    metrics = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'upstream_retries_total{model="tiny",reason="unreachable"} 2.0' in metrics


async def test_a_single_engine_that_failed_is_tried_again(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviours.extend([fake.breaks_off(0), fake.breaks_off(0)])
    assert (await gateway.chat()).text == "hello world"
    assert num_requests(engines) == [3, 0, 0]


async def test_if_all_engines_stay_full_the_client_gets_retry_after(engines, gateways, fake, monkeypatch) -> None:
    monkeypatch.setattr(reservations, "BASE_PAUSE_S", 2.0)
    gateway = await gateways(*engines[:2], queue=QueueLimits(max_requests=9, max_bytes=10**6, timeout_s=0.2))
    for engine in engines[:2]:
        engine.behaviour = fake.refuses(503, retry_after="7")
    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (503, "server_is_overloaded")
    assert 1 <= int(reply.headers["retry-after"]) <= 120
    assert num_requests(engines) == [1, 1, 0], "a full engine must not be tried twice"
    engines[0].behaviour = fake.says("ok")
    engines[1].behaviour = fake.says("ok")
    backoffs = [gateway.record(engine).refusal_backoff for engine in engines[:2]]
    await fake.until(lambda: all(each.allows(0, time.monotonic()) for each in backoffs))
    assert (await gateway.chat()).text == "ok"


async def test_the_engines_message_about_a_bad_request_reaches_the_client(engines, gateways, fake) -> None:
    gateway = await gateways(*engines)
    for engine in engines:
        engine.behaviour = fake.refuses(400, param="max_tokens", code="too_much", message="no room")
    reply = await gateway.chat()
    assert reply.status == 400
    assert (reply.error["param"], reply.error["code"], reply.error["message"]) == ("max_tokens", "too_much", "no room")
    assert sum(num_requests(engines)) == 1


def fails_with(status: int, *, after: int, stream: bool, fake):
    """Send a last frame that reports the failure of this request."""

    async def behave(engine, request, response, http) -> None:
        await response.prepare(http)
        for frame in fake.answer_frames(request, ("a", "b"))[:after]:
            await response.write(frame)
            await asyncio.sleep(0.05)
        error = unavailable("engine says no", code="draining")
        payload = render.sse_error(error) if stream else error_body(error)
        await response.write(
            encode_frame(
                FrameMeta(
                    last=True,
                    error="engine says no",
                    error_status=status,
                    error_type=error.type,
                    error_code=error.code,
                ),
                payload,
            )
        )
        await response.write_eof()

    return behave


@pytest.mark.parametrize("status", [500, 503])
async def test_an_engines_error_frame_is_retried_before_the_first_byte(engines, gateways, fake, status) -> None:
    gateway = await gateways(*engines[:2])
    engines[0].behaviour = fails_with(status, after=0, stream=True, fake=fake)
    for _ in range(4):
        assert (await gateway.chat(stream=True)).streamed_text == "hello world"
    assert gateway.gateway.control.brain.recovery.ejection(gateway.record(engines[0])).num_failures == 0, (
        "the failure of one request must not eject the engine"
    )


async def test_an_engines_error_event_ends_a_stream_that_has_begun(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = fails_with(503, after=1, stream=True, fake=fake)
    reply = await gateway.chat(stream=True)
    (message,) = [event["error"]["message"] for event in reply.events if "error" in event]
    assert "engine says no" in message
    assert "error" in reply.events[-1]


@pytest.mark.layouts
async def test_a_client_that_leaves_stops_the_engine_at_once(engines, gateways, fake, caplog) -> None:
    gateway = await gateways(engines[0])
    for stream in (False, True):
        gate = asyncio.Event()
        engines[0].behaviour = fake.says("a", "b", gate=gate) if stream else fake.hangs
        seen = len(engines[0].requests)
        with caplog.at_level("INFO", logger="pagemill.gateway.access"):
            task = asyncio.create_task(gateway.chat(stream=stream))
            await fake.until(lambda seen=seen: len(engines[0].requests) == seen + 1)
            task.cancel()
            await fake.until(lambda stream=stream: engines[0].num_aborted == 1 + stream)
            await fake.until(lambda: gateway.record(engines[0]).in_flight == 0)
            await fake.until(lambda stream=stream: caplog.text.count('"status":499') == 1 + stream)
        assert gateway.gateway.control.brain.recovery.ejection(gateway.record(engines[0])).num_failures == 0
    assert gateway.gateway.worker.in_flight_limit.num_in_flight == 0


async def test_a_client_that_leaves_stops_all_its_prompts(engines, gateways, fake) -> None:
    gateway = await gateways(*engines)
    for engine in engines:
        engine.behaviour = fake.hangs
    task = asyncio.create_task(gateway.complete(prompt=["a", "b", "c"]))
    await fake.until(lambda: num_requests(engines) == [1, 1, 1])
    task.cancel()
    await fake.until(lambda: [engine.num_aborted for engine in engines] == [1, 1, 1])


async def test_a_deadline_before_the_first_byte_is_a_504(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    await gateway.chat()
    engines[0].behaviour = fake.hangs
    reply = await gateway.chat(headers={"x-request-timeout-s": "1.5"})
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    await fake.until(lambda: engines[0].num_aborted == 1)


async def test_a_deadline_after_the_first_byte_is_an_error_event(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    await gateway.chat()
    engines[0].behaviour = fake.says("a", "b", gate=asyncio.Event())
    reply = await gateway.chat(stream=True, headers={"x-request-timeout-s": "1.5"})
    assert reply.streamed_text == "a"
    assert reply.events[-1]["error"]["code"] == "deadline_exceeded"


async def test_an_engine_without_answers_and_reports_is_abandoned(engines, gateways, fake) -> None:
    for engine in engines[:2]:
        engine.silent = True
    gateway = await gateways(*engines[:2], silence_timeout_s=0.1, state_stale_after_s=0.1, state_idle_timeout_s=60)
    engines[0].behaviour = engines[1].behaviour = fake.hangs
    first = asyncio.create_task(gateway.chat())
    await fake.until(lambda: sum(num_requests(engines)) == 1)
    for engine in engines[:2]:
        engine.behaviour = fake.says("late")
    assert (await first).text == "late"


async def test_a_silent_engine_that_still_reports_is_waited_for(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], silence_timeout_s=0.05, state_stale_after_s=60)
    gate = asyncio.Event()
    engines[0].behaviour = fake.says("slow", "ly", gate=gate)
    task = asyncio.create_task(gateway.chat(stream=True))
    await asyncio.sleep(0.3)
    gate.set()
    assert (await task).streamed_text == "slowly"
    assert len(engines[0].requests) == 1


@pytest.mark.layouts
async def test_an_engine_that_never_answers_the_request_is_abandoned(engines, gateways, fake) -> None:
    async def swallows(engine, request, response, http) -> None:
        await asyncio.Event().wait()

    gateway = await gateways(*engines[:2], accept_timeout_s=1.0)
    engines[0].behaviour = swallows
    for _ in range(2):
        assert (await gateway.chat()).text == "hello world"


@pytest.mark.slow
async def test_a_failed_engine_is_ejected_then_probed_then_used_again(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2], ejection_base_s=3.0)
    bad = engines[0]
    bad.behaviour = fake.refuses(500)
    while not bad.requests:
        assert (await gateway.chat()).status == 200
    for _ in range(10):
        await gateway.chat()
    assert len(bad.requests) == 1
    bad.behaviour = fake.says("back")
    await fake.until(lambda: gateway.gateway.control.brain.reader.phase(gateway.record(bad)) == "ready")
    replies = [(await gateway.chat()).text for _ in range(10)]
    assert replies.count("back") == 5


async def test_a_slow_reader_pauses_the_engine_and_finally_loses_its_stream(engines, gateways, fake) -> None:
    sent_bytes = 0

    async def floods(engine, request, response, http) -> None:
        nonlocal sent_bytes
        await response.prepare(http)
        frame = encode_frame(FrameMeta(token_ids=[1]), b"data: " + b"x" * 65536 + b"\n\n")
        while True:
            await response.write(frame)
            sent_bytes += len(frame)

    gateway = await gateways(engines[0], slow_client_timeout_s=1.0)
    engines[0].behaviour = floods
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    url = gateway.url + "/v1/chat/completions"
    async with aiohttp.ClientSession(read_bufsize=1024) as session, session.post(url, json=body) as response:
        await fake.until(lambda: sent_bytes > 100_000)
        before = -1
        while before != sent_bytes:
            before = sent_bytes
            await asyncio.sleep(0.3)
        assert sent_bytes < 64 * 2**20
        assert (await gateway.chat(model="nope")).status == 404, "other clients must be served meanwhile"
        await fake.until(lambda: engines[0].num_aborted == 1)
        await fake.until(lambda: gateway.gateway.worker.in_flight_limit.num_in_flight == 0)
        response.close()


async def test_a_request_beyond_the_gateways_limit_is_refused(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], max_requests=2)
    gate = asyncio.Event()
    engines[0].behaviour = fake.says("a", "b", gate=gate)
    tasks = [asyncio.create_task(gateway.chat(stream=True)) for _ in range(2)]
    await fake.until(lambda: len(engines[0].requests) == 2)
    refused = await gateway.chat()
    assert (refused.status, refused.error["code"]) == (503, "server_is_overloaded")
    assert "retry-after" in refused.headers
    gate.set()
    assert [(await task).streamed_text for task in tasks] == ["ab", "ab"]


async def test_bodies_beyond_the_gateways_memory_are_refused_while_others_are_served(engines, gateways, fake) -> None:
    gate = asyncio.Event()
    engines[0].behaviour = fake.says("a", "b", gate=gate)
    gateway = await gateways(engines[0], max_body_bytes=100_000, max_in_flight_body_bytes=150_000)
    first = asyncio.create_task(gateway.complete(prompt="x", stream=True, padding="u" * 90_000))
    await fake.until(lambda: bool(engines[0].requests))
    declared = await gateway.complete(padding="u" * 90_000)
    chunked = await _send_in_pieces(gateway, b'{"padding": "' + b"u" * 90_000 + b'"}')
    for refused in (declared, chunked):
        assert (refused.status, refused.error["code"]) == (503, "server_is_overloaded")
        assert refused.headers["retry-after"] == "1"
        assert "limit is 150000" in refused.error["message"]
    metrics = (await gateway.get("/metrics", control=True)).raw.decode()
    assert float(re.search(r"^pagemill_gateway_in_flight_body_bytes (\S+)$", metrics, re.MULTILINE).group(1)) > 90_000
    gate.set()
    assert (await first).status == 200
    await fake.until(lambda: gateway.gateway.worker.in_flight_limit.num_bytes == 0)
    assert (await gateway.complete(padding="u" * 90_000)).status == 200


async def _send_in_pieces(gateway, body):
    async def pieces():
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    headers = {"Content-Type": "application/json"}
    async with gateway.session.post(f"{gateway.url}/v1/completions", data=pieces(), headers=headers) as response:
        headers = {name.lower(): value for name, value in response.headers.items()}
        return SimpleNamespace(status=response.status, headers=headers, error=(await response.json())["error"])


async def test_events_are_whole_however_the_network_cuts_them(engines, gateways, fake) -> None:
    async def dribbles(engine, request, response, http) -> None:
        await response.prepare(http)
        for byte in b"".join(fake.answer_frames(request, ("a", "ü", "c"))):
            await response.write(bytes([byte]))
        await response.write_eof()

    gateway = await gateways(engines[0])
    engines[0].behaviour = dribbles
    assert (await gateway.chat(stream=True)).streamed_text == "aüc"


@pytest.mark.slow
@pytest.mark.layouts
async def test_a_hundred_clients_lose_nothing_when_an_engine_dies_and_returns(engines, gateways, fake) -> None:
    gateway = await gateways(*engines, ejection_base_s=0.05)
    num_done = 0

    async def client(number: int) -> None:
        nonlocal num_done
        for turn in range(4):
            reply = await gateway.chat(stream=(number + turn) % 2 == 0)
            assert reply.status == 200, reply.raw
            if (number + turn) % 2 == 0:
                assert reply.events[-1] == "[DONE]" or "error" in reply.events[-1]
            else:
                assert reply.text == "hello world"
            num_done += 1

    clients = asyncio.gather(*(client(number) for number in range(60)))
    await fake.until(lambda: num_done > 40, progress=lambda: num_done)
    await engines[0].kill()
    await fake.until(lambda: num_done > 140, progress=lambda: num_done)
    await engines[0].start()
    await clients
    assert num_done == 240
    records = gateway.gateway.control.brain.registry.endpoints.values()
    await fake.until(lambda: all(record.in_flight == 0 for record in records))
