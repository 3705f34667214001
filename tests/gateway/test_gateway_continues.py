"""Answers whose engines break, hang, drain or crash: another engine continues them, or the client gets the reason."""

from __future__ import annotations

import asyncio

import openai
import pytest

from pagemill_api.openai import render
from pagemill_gateway.relay.journal import ROOM_TOKENS
from pagemill_protocol.errors import unavailable
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.request.generate import FrameMeta
from pagemill_servers.auth import hash_key


def num_requests(engines) -> list[int]:
    return [len(engine.requests) for engine in engines]


def one_frame_then(fake, *, end):
    """Send the first requested frame, then call `end`."""

    async def behave(engine, request, response, http) -> None:
        await response.prepare(http)
        await response.write(fake.answer_frames(request, ("a", "b", "c"))[0])
        await asyncio.sleep(0.05)
        if end == "garbage":
            await response.write(b"\xff" * 64)
        elif end == "reset":
            http.transport.abort()
            return
        await response.write_eof()

    return behave


@pytest.mark.parametrize("fault", ["reset", "garbage", "early end"])
@pytest.mark.layouts
async def test_another_engine_continues_a_stream_whose_engines_fail(engines, gateways, fake, fault, caplog) -> None:
    gateway = await gateways(*engines)
    for engine in engines:
        engine.behaviours.append(one_frame_then(fake, end=fault))
        engine.behaviour = fake.says("a", "b", "c")
    with caplog.at_level("INFO", logger="pagemill.gateway.access"):
        reply = await gateway.chat(stream=True)
        await fake.until(lambda: '"migrations":3' in caplog.text)
    assert reply.status == 200
    assert (reply.streamed_text, reply.events[-1]) == ("abc", "[DONE]")
    asked = [request for engine in engines for request in engine.requests]
    assert sorted(len(choice.token_ids) for request in asked for choice in request.resume) == [1, 2, 3]
    assert {event["id"] for event in reply.events[:-1]} == {min(request.request_id for request in asked)}
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    reason = "broken" if fault == "garbage" else "lost"
    assert f'pagemill_gateway_migrations_total{{model="tiny",reason="{reason}"}} 3.0' in text
    assert 'pagemill_gateway_migrated_tokens_total{model="tiny"} 6.0' in text
    assert "pagemill_gateway_journal_tokens 0.0" in text


async def test_a_body_that_another_engine_continued_is_marked(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2])
    begun = encode_frame(FrameMeta(token_ids=[1], position=1))
    for engine in engines[:2]:
        engine.behaviours.append(fake.sends(begun))
    reply = await gateway.chat()
    assert (reply.status, reply.text, reply.headers["x-pagemill-migrations"]) == (200, "hello world", "2")
    assert "x-pagemill-migrations" not in (await gateway.chat()).headers


async def kill_in_mid_stream(gateway, engines, fake, stream):
    """Kill the engine that has begun to answer; `stream` is the client's request."""
    gates = {engine.name: asyncio.Event() for engine in engines}
    for engine in engines:
        engine.behaviour = fake.says("a", "b", gate=gates[engine.name])
    reply = asyncio.create_task(stream())
    await fake.until(lambda: sum(num_requests(engines)) == 1)
    begun = next(engine for engine in engines if engine.requests)
    await fake.until(lambda: gateway.gateway.worker.relay.journal_capacity.num_tokens >= 1)
    await begun.kill()
    return begun, reply


async def test_a_stream_without_another_engine_of_its_weights_ends_in_an_error_event(engines, gateways, fake) -> None:
    for engine in engines:
        engine.weights_digest = f"weights of {engine.name}"
    gateway = await gateways(*engines)
    _, task = await kill_in_mid_stream(gateway, engines, fake, lambda: gateway.chat(stream=True))
    reply = await task
    assert (reply.status, reply.streamed_text) == (200, "a")
    assert reply.events[-1]["error"]["code"] == "bad_upstream"
    assert "[DONE]" not in reply.events
    assert sum(num_requests(engines)) == 1, "engines of other weights must not be asked to continue"
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert "pagemill_gateway_broken_streams_total" in text


async def test_a_body_begun_with_other_weights_starts_again(engines, gateways, fake) -> None:
    for engine in engines:
        engine.weights_digest = f"weights of {engine.name}"
        engine.behaviour = fake.says("whole")
    gateway = await gateways(*engines[:2])

    async def dies(engine, request, response, http) -> None:
        await response.prepare(http)
        await response.write(encode_frame(FrameMeta(token_ids=[1], position=1)))
        await asyncio.sleep(0.05)
        await engine.kill()

    engines[0].behaviours.append(dies)
    reply = await gateway.chat()
    if not engines[0].requests:
        reply = await gateway.chat()
    assert (reply.status, reply.text) == (200, "whole")
    assert engines[1].requests[-1].resume == []


async def test_the_openai_client_raises_when_a_stream_breaks(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        message = [{"role": "user", "content": "hi"}]

        async def read() -> None:
            stream = await client.chat.completions.create(model="tiny", messages=message, stream=True)
            with pytest.raises(openai.APIError):
                [chunk async for chunk in stream]

        _, reading = await kill_in_mid_stream(gateway, engines[:1], fake, read)
        await reading


async def test_one_lost_prompt_of_several_is_continued(engines, gateways, fake) -> None:
    gateway = await gateways(*engines)
    engines[1].behaviours.append(fake.breaks_off(2))
    for engine in engines:
        engine.behaviour = fake.says("a", "b", "c")
    reply = await gateway.complete(prompt=["a", "b", "c"], stream=True)
    texts = {0: "", 1: "", 2: ""}
    for event in reply.events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert (texts, reply.events[-1]) == ({0: "abc", 1: "abc", 2: "abc"}, "[DONE]")


def runs_out_of_patience(fake, *, after: int):
    """Send some frames, then the engine's error that it shuts down."""

    async def behave(engine, request, response, http) -> None:
        await response.prepare(http)
        for frame in fake.answer_frames(request, ("a", "b"))[:after]:
            await response.write(frame)
            await asyncio.sleep(0.05)
        error = unavailable("engine says no", code="draining")
        meta = FrameMeta(
            last=True,
            error=error.message,
            error_status=503,
            error_type=error.type,
            error_code=error.code,
        )
        await response.write(encode_frame(meta, render.sse_error(error)))
        await response.write_eof()

    return behave


async def test_an_engine_whose_drain_times_out_hands_its_streams_over(engines, gateways, fake) -> None:
    gateway = await gateways(*engines)
    engines[2].behaviour = fake.says("a", "b")
    for engine in engines[:2]:
        engine.behaviour = runs_out_of_patience(fake, after=1)
    for _ in range(3):
        reply = await gateway.chat(stream=True)
        assert (reply.streamed_text, reply.events[-1]) == ("ab", "[DONE]")
    assert [len(engine.requests) for engine in engines[:2]] == [1, 1], "other engines were asked once and then no more"


def crashes(fake, *, after: int, code: str = "engine_crashed"):
    """Crash, because of the engine's own work or another client's: its server reports it, then nothing listens."""

    async def behave(engine, request, response, http) -> None:
        await response.prepare(http)
        for frame in fake.answer_frames(request, ("a", "b", "c", "d"))[:after]:
            await response.write(frame)
        error = unavailable("This server failed", code=code)
        meta = FrameMeta(
            last=True,
            error=error.message,
            error_status=503,
            error_type=error.type,
            error_code=error.code,
        )
        await response.write(encode_frame(meta, render.sse_error(error)))
        await response.write_eof()

    return behave


async def test_a_request_that_crashes_two_engines_is_not_tried_on_a_third(engines, gateways, fake) -> None:
    gateway = await gateways(*engines, outage_wait_s=5.0)
    for engine in engines:
        engine.behaviour = crashes(fake, after=0)
    reply = await gateway.chat(stream=True)
    assert (reply.status, reply.error["code"]) == (500, "request_crashed_engine")
    assert sorted(num_requests(engines)) == [0, 1, 1]
    scrape = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'poison_probes_total{model="tiny",outcome="ended"} 1.0' in scrape
    assert 'poison_probes_total{model="tiny",outcome="blamed"} 1.0' in scrape


def fails(code: str):
    """Return the behaviour of an engine that works and fails this request."""

    async def behave(engine, request, response, http) -> None:
        await response.prepare(http)
        meta = FrameMeta(last=True, error="It failed.", error_status=500, error_type="server_error", error_code=code)
        await response.write(encode_frame(meta, b""))
        await response.write_eof()

    return behave


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_rendered_is_not_generated_again(engines, gateways, fake, stream: bool) -> None:
    gateway = await gateways(*engines)
    for engine in engines:
        engine.behaviour = fails("rendering_failed")
    reply = await gateway.chat(stream=stream)
    assert (reply.status, reply.error["code"]) == (500, "rendering_failed")
    assert sum(num_requests(engines)) == 1


async def test_a_request_that_two_working_engines_fail_is_not_tried_on_a_third(engines, gateways, fake) -> None:
    gateway = await gateways(*engines)
    for engine in engines:
        engine.behaviour = fails("internal_error")
    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (502, "bad_upstream")
    assert sorted(num_requests(engines)) == [0, 1, 1]


async def test_a_request_that_makes_two_engines_silent_is_not_sent_to_a_third(engines, gateways, fake) -> None:
    gateway = await gateways(*engines, silence_timeout_s=0.2, state_stale_after_s=0.2, state_idle_timeout_s=60)
    for engine in engines:
        engine.silent = True
        engine.behaviour = fake.hangs
    reply = await gateway.chat(stream=True)
    assert (reply.status, reply.error["code"]) == (500, "request_crashed_engine")
    assert sorted(num_requests(engines)) == [0, 1, 1]


async def test_a_request_whose_engines_were_all_killed_is_not_probed(engines, gateways, fake) -> None:
    gateway = await gateways(*engines, outage_wait_s=5.0)
    for engine in engines:
        engine.behaviours.append(crashes(fake, after=0, code="engine_failed"))
        engine.behaviour = fake.says("a", "b")
    reply = await gateway.chat(stream=True)
    assert (reply.streamed_text, sum(num_requests(engines))) == ("ab", len(engines) + 1)
    scrape = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'upstream_retries_total{model="tiny",reason="killed"} 3.0' in scrape
    assert 'poison_probes_total{model="tiny",outcome="cleared"} 0.0' in scrape


async def test_a_stream_that_makes_progress_survives_crashes(engines, gateways, fake) -> None:
    gateway = await gateways(*engines, outage_wait_s=5.0)
    for engine in engines:
        engine.behaviours.append(crashes(fake, after=1))
        engine.behaviour = fake.says("a", "b", "c", "d")
    reply = await gateway.chat(stream=True)
    assert (reply.streamed_text, reply.events[-1]) == ("abcd", "[DONE]")
    assert sum(num_requests(engines)) == len(engines) + 1


@pytest.mark.layouts
async def test_requests_that_ran_beside_a_crash_are_retried_one_at_a_time(engines, gateways, fake) -> None:
    """Two engines are left for the three requests of the crashed one, so the third waits."""
    crash, first = engines[0], asyncio.Event()
    gateway = await gateways(crash, outage_wait_s=30.0)

    async def crashes_with_all(engine, request, response, http) -> None:
        await first.wait()
        await crashes(fake, after=0)(engine, request, response, http)

    crash.behaviour = crashes_with_all
    clients = [asyncio.create_task(gateway.chat()) for _ in range(3)]
    await fake.until(lambda: len(crash.requests) == 3)
    gateway.gateway.control.apply_catalog(fake.catalog_of(*engines))
    await gateway.know(*engines)
    gates = {engine.name: asyncio.Event() for engine in engines}

    async def waits(engine, request, response, http) -> None:
        await gates[engine.name].wait()
        await fake.says("ok")(engine, request, response, http)

    for engine in engines:
        engine.behaviour = waits if engine is not crash else crash.behaviour
    crash.draining = True
    await crash.push_state()
    first.set()
    await fake.until(lambda: num_requests(engines)[1:] == [1, 1])
    await asyncio.sleep(0.2)
    assert num_requests(engines)[1:] == [1, 1], "the third request must not run together with another probe"
    gates[engines[1].name].set()
    gates[engines[2].name].set()
    assert [(await client).text for client in clients] == ["ok"] * 3


async def test_another_engine_continues_a_stream_whose_engine_hangs(engines, gateways, fake) -> None:
    """A suspended process behaves like this: connections stay open and nothing arrives."""
    gateway = await gateways(*engines[:2], silence_timeout_s=0.2, state_stale_after_s=0.2, state_idle_timeout_s=60)
    for engine in engines[:2]:
        engine.silent = True
        engine.behaviours.append(fake.says("a", "b", gate=asyncio.Event()))
        engine.behaviour = fake.says("a", "b")
    reply = await gateway.chat(stream=True)
    assert (reply.streamed_text, reply.events[-1]) == ("ab", "[DONE]")
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'pagemill_gateway_migrations_total{model="tiny",reason="stalled"}' in text


async def test_an_engine_that_reports_but_makes_no_step_is_abandoned(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2], silence_timeout_s=0.2, state_stale_after_s=60, stall_timeout_s=5)
    for engine in engines[:2]:
        engine.behaviours.append(fake.says("a", "b", gate=asyncio.Event()))
        engine.behaviour = fake.says("a", "b")
    task = asyncio.create_task(gateway.chat(stream=True))
    await fake.until(lambda: gateway.gateway.worker.relay.journal_capacity.num_tokens >= 1)
    stuck, other = sorted(engines[:2], key=lambda engine: not engine.requests)
    other.behaviours.clear()
    await stuck.push_state(silent_s=4.0)
    await asyncio.sleep(0.5)
    assert not task.done(), "a single step may take long"
    await stuck.push_state(silent_s=6.0)
    assert (await task).streamed_text == "ab"


async def test_an_engine_whose_process_is_suspended_is_abandoned(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2], silence_timeout_s=0.2, state_stale_after_s=60)
    for engine in engines[:2]:
        engine.behaviours.append(fake.says("a", "b", gate=asyncio.Event()))
        engine.behaviour = fake.says("a", "b")
    task = asyncio.create_task(gateway.chat(stream=True))
    await fake.until(lambda: gateway.gateway.worker.relay.journal_capacity.num_tokens >= 1)
    stopped, other = sorted(engines[:2], key=lambda engine: not engine.requests)
    other.behaviours.clear()
    await stopped.push_state(silent_s=3.0, frozen_s=3.0)
    await asyncio.sleep(0.5)
    assert not task.done()
    await stopped.push_state(silent_s=4.1, frozen_s=4.1)
    assert (await task).streamed_text == "ab"


# -- with limits, reservations and the queue ---------------------------------------------------------------------------

KEY = {"Authorization": "Bearer sk-one"}
PROMPT_TOKENS = len("<user>hi<assistant>")


def limited(**limits: int) -> list[str]:
    return [" ".join([hash_key("sk-one"), *(f"{name}={value}" for name, value in limits.items())])]


async def remaining_tokens(gateway) -> int:
    """Return the tokens that the key had left before this request's reservation."""
    headers = (await gateway.chat(headers=KEY, max_tokens=10)).headers
    return int(headers["x-ratelimit-remaining-tokens"]) + PROMPT_TOKENS + 10


def held(gateway, engines) -> list[int]:
    """Return everything that requests reserve while they run."""
    brain, records = gateway.gateway.control.brain, [gateway.record(engine) for engine in engines]
    queue = brain.queues.state("default/d")
    counts = [len(brain._open), gateway.gateway.worker.relay.journal_capacity.num_tokens, queue.num_requests]
    for record in records:
        counts += [record.in_flight, len(record.reserved), record.reserved.num_bytes, record.dispatches.num_open]
    return counts


async def reports_one_more(engine, request, response, http) -> None:
    """Send one more frame of an answer that is not streamed; then end the connection."""
    position = 1 + sum(len(resume.token_ids) for resume in request.resume)
    await response.prepare(http)
    await response.write(encode_frame(FrameMeta(token_ids=[1], position=position)))
    await response.write_eof()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.layouts
async def test_a_continued_answer_is_charged_once_and_reserves_nothing_afterwards(
    engines, gateways, fake, stream, caplog
) -> None:
    gateway = await gateways(*engines, api_keys=limited(tokens_per_minute=1000, concurrency=1))
    for engine in engines:
        engine.behaviours.append(one_frame_then(fake, end="reset") if stream else reports_one_more)
        engine.behaviour = fake.says("a", "b", "c")
    with caplog.at_level("INFO", logger="pagemill.gateway.access"):
        reply = await gateway.chat(headers=KEY, stream=stream)
        await fake.until(lambda: '"migrations":3' in caplog.text)
    assert (reply.status, reply.streamed_text if stream else reply.text) == (200, "abc")
    assert len([each for each in caplog.records if each.name == "pagemill.gateway.access"]) == 1
    await fake.until(lambda: not any(held(gateway, engines)))
    assert await remaining_tokens(gateway) == 1000 - (PROMPT_TOKENS + 3), "one prompt, three tokens, no other lease"


async def test_a_broken_stream_is_charged_for_its_tokens_and_reserves_nothing(engines, gateways, fake) -> None:
    for engine in engines:
        engine.weights_digest = f"weights of {engine.name}"
    gateway = await gateways(*engines, api_keys=limited(tokens_per_minute=1000, concurrency=1))
    _, task = await kill_in_mid_stream(
        gateway, engines, fake, lambda: gateway.chat(stream=True, headers=KEY, max_tokens=10)
    )
    assert (await task).events[-1]["error"]["code"] == "bad_upstream"
    await fake.until(lambda: not any(held(gateway, engines)))
    for engine in engines:
        engine.behaviour = fake.says("ok")
    assert await remaining_tokens(gateway) == 1000 - (PROMPT_TOKENS + 1)


async def test_a_killed_stream_waits_for_capacity_on_another_engine_and_continues(
    engines, gateways, fake, caplog
) -> None:
    """The client gets comments meanwhile; the stream gets the next slot before requests that arrived earlier."""
    first, second = engines[:2]
    first.max_num_seqs = second.max_num_seqs = 1
    gateway = await gateways(first, second, keep_alive_interval_s=0.05)
    gates = [asyncio.Event(), asyncio.Event()]
    for engine, gate in zip(engines, gates, strict=False):
        engine.behaviours.append(fake.says("a", "b", "c", gate=gate))
        engine.behaviour = fake.says("a", "b", "c")
    streams = [asyncio.create_task(gateway.chat(stream=True)) for _ in range(2)]
    await fake.until(lambda: gateway.gateway.worker.relay.journal_capacity.num_tokens == 2 * ROOM_TOKENS)
    waiting = [asyncio.create_task(gateway.chat(stream=True)) for _ in range(3)]
    await fake.until(lambda: gateway.gateway.control.brain.queues.state("default/d").num_requests == 3)
    with caplog.at_level("INFO", logger="pagemill.gateway.access"):
        await first.kill()
        await fake.until(lambda: gateway.gateway.control.brain.queues.state("default/d").num_requests == 4)
        await asyncio.sleep(0.2)
        gates[1].set()
        replies = await asyncio.gather(*streams, *waiting)
        await fake.until(lambda: caplog.text.count('"event":"request"') == 5)
    assert [reply.streamed_text for reply in replies] == ["abc"] * 5
    assert [bool(request.resume) for request in second.requests] == [False, True, False, False, False]
    assert second.most_inside == 1
    (raw,) = [reply.raw for reply in replies[:2] if b": waiting" in reply.raw]
    assert raw.index(b'"content":"a"') < raw.index(b": waiting") < raw.index(b'"content":"b"')
    assert caplog.text.count('"migrations":1') == 1
    await fake.until(lambda: not any(held(gateway, engines[:2])))
