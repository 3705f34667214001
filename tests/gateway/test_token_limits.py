"""Limits of tokens and sequences at a running gateway: no tenant exceeds them, and a request gets what is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis_server import RedisServer, redis_server

from pagemill_gateway.config import RedisConfig
from pagemill_servers.auth import hash_key

KEY = {"Authorization": "Bearer sk-one"}
PROMPT = len("<user>hi<assistant>")


def limited(limits: str) -> dict[str, Any]:
    return {"api_keys": [f"{hash_key('sk-one')} tenant=a {limits}"]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


def usage_of(reply: Any) -> int:
    usage = reply.json["usage"]
    return int(usage["prompt_tokens"] + usage["completion_tokens"])


def finish_reasons(reply: Any) -> set[str]:
    return {choice["finish_reason"] for choice in reply.json["choices"]}


def remaining(reply: Any) -> int:
    return int(reply.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.layouts
async def test_short_answers_do_not_permit_many_long_ones(engines, gateways, fake) -> None:
    """After 30 answers of one token come 60 concurrent requests with 200 each, whose expected lengths are short."""
    engines[0].behaviour = fake.generates(step_s=0.001)
    gateway = await gateways(engines[0], **limited("tokens_per_minute=1200"))
    for _ in range(30):
        assert (await gateway.chat(headers=KEY, max_tokens=1)).status == 200
    replies = await asyncio.gather(*(gateway.chat(headers=KEY, max_tokens=200) for _ in range(60)))
    served = [reply for reply in replies if reply.status == 200]
    assert 30 * (PROMPT + 1) + sum(map(usage_of, served)) <= 1200
    assert len(served) == 2
    for reply in replies:
        if reply.status != 200:
            assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
            assert "Limit 1200, remaining 162, requested about 219. Try again in" in reply.error["message"]
            assert 1 <= int(reply.headers["retry-after"]) <= 61


@pytest.mark.layouts
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_max_tokens_is_served_up_to_a_limit_below_the_context(
    engines, gateways, fake, stream: bool
) -> None:
    engines[0].behaviour = fake.generates(step_s=0.001)
    gateway = await gateways(engines[0], **limited("tokens_per_minute=400"))
    reply = await gateway.chat(headers=KEY, stream=stream, stream_options={"include_usage": True} if stream else None)
    assert reply.status == 200
    if stream:
        *_, ending, closing, done = reply.events
        assert (ending["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert closing["usage"]["total_tokens"] == 400
    else:
        assert (finish_reasons(reply), usage_of(reply)) == ({"length"}, 400)
    refused = await gateway.chat(headers=KEY, max_tokens=1)
    assert (refused.status, refused.error["type"]) == (429, "tokens")
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'pagemill_gateway_answers_ended_by_limit_total{model="tiny"} 1.0' in text


@pytest.mark.layouts
@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_answer_is_not_cut_while_tokens_are_left(engines, gateways, fake, stream: bool, caplog) -> None:
    caplog.set_level(logging.INFO)
    engines[0].behaviour = fake.generates(step_s=0.001)
    gateway = await gateways(engines[0], **limited("tokens_per_minute=100000"))
    reply = await gateway.chat(headers=KEY, n=2, max_tokens=900, stream=stream)
    assert reply.status == 200
    assert [request.token_allowance for request in engines[0].requests] == [256]
    assert engines[0].num_raises >= 2
    assert engines[0].num_generated == 2 * 900
    left = remaining(await gateway.chat(headers=KEY, max_tokens=1))
    assert left == 100_000 - (PROMPT + 1800) - (PROMPT + 1), "the request must be settled once, with the used tokens"
    lines = [msgspec.json.decode(each.message) for each in caplog.records if each.name == "pagemill.gateway.access"]
    assert "ended_by_limit" not in lines[0]


async def test_an_answer_continues_when_other_requests_return_tokens(engines, gateways, fake) -> None:
    gate = asyncio.Event()
    engines[0].behaviour = fake.generates(step_s=0.002)
    engines[0].behaviours.append(fake.generates(1, gate=gate))
    gateway = await gateways(engines[0], **limited(f"tokens_per_minute={2 * (PROMPT + 256) + 100}"))
    holding = asyncio.create_task(gateway.chat(headers=KEY, max_tokens=256))
    await fake.until(lambda: engines[0].num_inside == 1)
    growing = asyncio.create_task(gateway.chat(headers=KEY, max_tokens=500))
    await fake.until(lambda: engines[0].num_raises == 1)
    gate.set()
    assert (await holding).status == 200
    reply = await growing
    assert (finish_reasons(reply), reply.json["usage"]["completion_tokens"]) == ({"length"}, 500)


async def test_an_engine_that_ignores_raised_allowances_ends_the_answer_at_its_allowance(
    engines, gateways, fake
) -> None:
    engines[0].behaviour = fake.generates()
    engines[0].deaf = True
    gateway = await gateways(engines[0], **limited("tokens_per_minute=100000"))
    reply = await gateway.chat(headers=KEY, max_tokens=900)
    assert (finish_reasons(reply), usage_of(reply)) == ({"length"}, PROMPT + 256)
    assert remaining(await gateway.chat(headers=KEY, max_tokens=1)) == 100_000 - (PROMPT + 256) - (PROMPT + 1)


@pytest.mark.layouts
async def test_an_exhausted_budget_ends_an_answer_and_then_is_an_insufficient_quota(engines, gateways, fake) -> None:
    engines[0].behaviour = fake.generates(step_s=0.001)
    gateway = await gateways(engines[0], **limited("tokens_per_day=500"))
    reply = await gateway.chat(headers=KEY, max_tokens=1000)
    assert (finish_reasons(reply), usage_of(reply)) == ({"length"}, 500)
    refused = await gateway.chat(headers=KEY, max_tokens=1)
    assert (refused.status, refused.error["code"]) == (429, "insufficient_quota")
    assert "500 tokens per day" in refused.error["message"]


@pytest.mark.layouts
async def test_limits_count_sequences_and_not_requests(engines, gateways, fake) -> None:
    gate = asyncio.Event()
    engines[0].behaviour = fake.generates(gate=gate)
    gateway = await gateways(engines[0], **limited("concurrency=6"))
    running = asyncio.create_task(gateway.complete(headers=KEY, prompt=["a", "b"], n=2, max_tokens=2))
    await fake.until(lambda: engines[0].num_inside == 2)
    for fields in ({"n": 3}, {"best_of": 3}, {"n": 3, "use_beam_search": True}, {"prompt": ["a", "b", "c"]}):
        reply = await gateway.complete(headers=KEY, max_tokens=2, **fields)
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
        assert "sequences at once. Limit 6, requested 3. Try again in 1s." in reply.error["message"]
        assert reply.headers["retry-after"] == "1"
    gate.set()
    assert (await running).status == 200
    assert (await gateway.complete(headers=KEY, prompt=["a", "b"], n=3, max_tokens=2)).status == 200


@pytest.mark.parametrize("fields", [{"n": 16}, {"best_of": 16}, {"n": 2, "prompt": ["a", "b", "c"]}])
async def test_sequences_beyond_the_limit_are_never_admitted(engines, gateways, fields: dict[str, Any]) -> None:
    gateway = await gateways(engines[0], **limited("concurrency=5"))
    reply = await gateway.complete(headers=KEY, max_tokens=2, **fields)
    assert (reply.status, reply.headers["x-should-retry"]) == (429, "false")
    assert "Limit 5, this request runs" in reply.error["message"]
    assert not engines[0].requests


async def test_every_prompt_gets_a_part_of_a_small_budget(engines, gateways, fake) -> None:
    engines[0].behaviour = fake.generates()
    gateway = await gateways(engines[0], **limited("tokens_per_minute=62"))
    reply = await gateway.complete(headers=KEY, prompt=["a", "b"], n=3, max_tokens=100)
    assert reply.status == 200
    assert usage_of(reply) == 2 + 60


async def test_a_client_that_leaves_is_charged_for_the_tokens_that_may_have_been_generated(
    engines, gateways, fake
) -> None:
    engines[0].behaviour = fake.generates(gate=asyncio.Event())
    gateway = await gateways(engines[0], **limited("tokens_per_minute=10000"))
    store = gateway.gateway.control.sharing.store
    charged = 0
    cases = (({"stream": True, "n": 2}, 2), ({"n": 2}, 2 * 16 - 2), ({"best_of": 4}, 4 * 100))
    for fields, generated in cases:
        task = asyncio.create_task(gateway.complete(headers=KEY, max_tokens=100, **fields))
        before = engines[0].num_generated
        await fake.until(lambda before=before: engines[0].num_generated > before)
        if "stream" in fields:
            await fake.until(lambda before=before: engines[0].num_generated == before + 2)
            await fake.until(lambda: gateway.gateway.worker.relay.journal_capacity.num_tokens >= 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await fake.until(lambda: store.num_held == 0)
        charged += len("hi") + generated
    engines[0].behaviour = fake.generates(1)
    reply = await gateway.chat(headers=KEY, max_tokens=1)
    assert remaining(reply) == 10_000 - charged - (PROMPT + 1)


async def test_a_migrated_answer_keeps_its_allowance_and_is_settled_once(engines, gateways, fake) -> None:
    gate = asyncio.Event()
    for engine in engines[:2]:
        engine.behaviour = fake.generates(step_s=0.002)
    gateway = await gateways(*engines[:2], **limited("tokens_per_minute=600"), ejection_base_s=0.05)
    task = asyncio.create_task(gateway.chat(headers=KEY, stream=True, max_tokens=2000))
    await fake.until(lambda: any(engine.num_raises for engine in engines))
    first, second = sorted(engines[:2], key=lambda engine: not engine.num_inside)
    await first.kill()
    reply = await task
    gate.set()
    assert reply.status == 200
    (request,) = second.requests
    assert request.resume
    assert request.token_allowance is not None
    assert request.token_allowance > 256
    assert len(reply.streamed_text) == 600 - PROMPT
    store = gateway.gateway.control.sharing.store
    await fake.until(lambda: store.num_held == 0)
    assert (await gateway.chat(headers=KEY, max_tokens=1)).status == 429, "all tokens must be used"


async def shared(gateways, engine, server: RedisServer, limits: str) -> Any:
    return await gateways(engine, **limited(limits), redis=RedisConfig(url=server.url, timeout_ms=10_000.0))


@pytest.mark.slow
async def test_gateways_that_share_a_limit_never_exceed_it_together(engines, gateways, server, fake) -> None:
    engines[0].behaviour = fake.generates(step_s=0.001)
    both = [await shared(gateways, engines[0], server, "tokens_per_minute=2000") for _ in range(2)]
    sharings = [each.gateway.control.sharing for each in both]
    # Where Redis answers late, a gateway decides by its share, which both must know of.
    await fake.until(lambda: all(each.up and each.store.num_gateways == 2 for each in sharings))
    fields = [{"max_tokens": 200}, {"max_tokens": 900}, {}, {"n": 2, "max_tokens": 400}]
    replies = await asyncio.gather(*(each.chat(headers=KEY, **more) for more in fields * 4 for each in both))
    served = [reply for reply in replies if reply.status == 200]
    assert sum(map(usage_of, served)) == sum(PROMPT for _ in served) + engines[0].num_generated
    assert 2000 - 300 < sum(map(usage_of, served)) <= 2000
    assert {reply.status for reply in replies} == {200, 429}


@pytest.mark.slow
async def test_without_redis_each_gateway_stays_within_its_share(engines, gateways, server, fake) -> None:
    engines[0].behaviour = fake.generates(step_s=0.001)
    both = [await shared(gateways, engines[0], server, "tokens_per_minute=2000") for _ in range(2)]
    sharings = [each.gateway.control.sharing for each in both]
    await fake.until(lambda: all(each.up and each.store.num_gateways == 2 for each in sharings))
    long = [asyncio.create_task(each.chat(headers=KEY, max_tokens=2000)) for each in both]
    await fake.until(lambda: engines[0].num_inside == 2)
    await asyncio.to_thread(server.kill)
    await fake.until(lambda: not any(each.up for each in sharings))
    for task, each in zip(long, both, strict=True):
        reply = await task
        assert finish_reasons(reply) == {"length"}
        assert usage_of(reply) <= 2000
        assert (await each.chat(headers=KEY, max_tokens=300)).status == 429
    assert sum(usage_of(task.result()) for task in long) <= 2000 + 512, (
        "the parts that Redis had granted, and the shares"
    )
