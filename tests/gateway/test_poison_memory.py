"""A request that crashed engines is not sent to another one for an hour, by any gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from redis_server import redis_server
from waiting import eventually

from pagemill_gateway.config import RedisConfig
from pagemill_gateway.relay.relay import content_of
from pagemill_protocol.errors import ENGINE_CRASHED, rendering_failed, unavailable
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_routing.attempts.attempts import MAX_CRASHES, MAX_FAULTS, Attempts
from pagemill_routing.brain.resilience.poison_memory import KEPT_S, MAX_KEPT, Poison, PoisonMemory
from pagemill_servers.auth import hash_key

NUM_POISON_TOKENS = 200
POISON = [{"role": "user", "content": "x" * NUM_POISON_TOKENS}]
TENANTS = [f"{hash_key(f'sk-{name}')} tenant={name}" for name in ("a", "b")]


def headers(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{tenant}"}


def poisoned(fake: Any) -> Any:
    """Return the behaviour of an engine that crashes with long prompts and answers others."""
    answers = fake.says("hello")

    async def behave(engine: Any, request: GenerateRequest, response: Any, http: Any) -> None:
        if len(request.prompt_token_ids) < NUM_POISON_TOKENS:
            await answers(engine, request, response, http)
            return
        await response.prepare(http)
        meta = FrameMeta(last=True, error="It crashed.", error_status=503, error_code=ENGINE_CRASHED)
        await response.write(encode_frame(meta, b""))
        await response.write_eof()

    return behave


async def poisoned_gateway(engines: Any, gateways: Any, fake: Any, **settings: Any) -> Any:
    for engine in engines:
        engine.behaviour = poisoned(fake)
    return await gateways(*engines, outage_wait_s=5.0, **settings)


def num_asked(engines: Any) -> int:
    return sum(len(engine.requests) for engine in engines)


@pytest.mark.layouts
async def test_a_blamed_request_reaches_no_engine_again(engines, gateways, fake) -> None:
    gateway = await poisoned_gateway(engines, gateways, fake, api_keys=TENANTS)
    first = await gateway.chat(messages=POISON, headers=headers("a"))
    assert (first.status, first.error["code"], first.headers["x-should-retry"]) == (
        500,
        "request_crashed_engine",
        "false",
    )
    asked = num_asked(engines)
    assert asked == 2

    async def is_refused() -> bool:
        reply = await gateway.chat(messages=POISON, stream=True, seed=9, headers=headers("a"))
        assert reply.headers["x-should-retry"] == "false"
        return (reply.status, reply.error["code"]) == (500, "poison_request")

    assert await is_refused()
    assert num_asked(engines) == asked
    assert (await gateway.chat(headers=headers("a"))).status == 200, "another content"
    for engine in engines:
        await engine.push_state(weights_digest="new weights")
    await eventually(lambda: gateway.record(engines[0]).weights_digest == "new weights")
    await eventually(lambda: not gateway.gateway.control._refused)
    asked = num_asked(engines)
    await gateway.chat(messages=POISON, headers=headers("a"))
    assert num_asked(engines) > asked, "a new version is tried again"


@pytest.mark.slow
async def test_another_tenant_is_not_refused_for_it(engines, gateways, fake) -> None:
    gateway = await poisoned_gateway(engines, gateways, fake, api_keys=TENANTS)
    await gateway.chat(messages=POISON, headers=headers("a"))
    asked = num_asked(engines)
    await gateway.chat(messages=POISON, headers=headers("b"))
    assert num_asked(engines) > asked


async def test_a_default_client_does_not_repeat_it(engines, gateways, fake) -> None:
    gateway = await poisoned_gateway(engines, gateways, fake)
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none") as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="tiny", messages=POISON)  # type: ignore[arg-type]
    assert num_asked(engines) == 2


async def test_gateways_with_redis_share_what_they_know(engines, gateways, fake, tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        redis = RedisConfig(url=server.url, timeout_ms=10_000.0)
        one = await poisoned_gateway(engines, gateways, fake, redis=redis)
        other = await poisoned_gateway(engines, gateways, fake, redis=redis)
        await eventually(lambda: one.gateway.control.sharing.up and other.gateway.control.sharing.up)
        await one.chat(messages=POISON)
        await eventually(lambda: other.gateway.control._refused)
        asked = num_asked(engines)
        reply = await other.chat(messages=POISON)
        assert (reply.status, reply.error["code"]) == (500, "poison_request")
        assert num_asked(engines) == asked


def test_it_is_forgotten_after_an_hour_and_bounded() -> None:
    now = 0.0
    memory = PoisonMemory(lambda: now)
    memory.remember(b"a", "weights")
    memory.add({Poison(b"b", ""): 10.0})
    assert memory.refused({"weights"}) == {b"a", b"b"}
    assert memory.refused({"others"}) == {b"b"}
    now = KEPT_S - 1
    assert memory.refused({"weights"}) == {b"a"}
    now = KEPT_S
    assert memory.refused({"weights"}) == frozenset()
    for number in range(MAX_KEPT + 5):
        memory.remember(b"%d" % number, "")
    assert len(memory.refused(())) == MAX_KEPT


def test_the_content_is_what_engines_compute() -> None:
    request = GenerateRequest(request_id="1", model="m", prompt_token_ids=[1, 2], sampling=SamplingParams(seed=1))
    known = content_of(request, "d", "tenant:a")
    sampling = request.sampling
    for same in (
        {"request_id": "2", "created_unix_s": 5, "stream": True, "priority": 3},
        {"sampling": msgspec.structs.replace(sampling, seed=2)},
    ):
        assert content_of(msgspec.structs.replace(request, **same), "d", "tenant:a") == known
    for other in (
        {"prompt_token_ids": [1, 3]},
        {"adapter_digest": "x"},
        {"sampling": msgspec.structs.replace(sampling, temperature=0.5)},
    ):
        assert content_of(msgspec.structs.replace(request, **other), "d", "tenant:a") != known
    assert content_of(request, "e", "tenant:a") != known
    assert content_of(request, "d", "tenant:b") != known


def test_failures_that_no_repetition_heals_say_so() -> None:
    crashed, faulty, broken = Attempts(3), Attempts(3), Attempts(3)
    for _ in range(MAX_CRASHES):
        crashed.ended("", crashed=True)
    for _ in range(MAX_FAULTS):
        faulty.record_break("", at_fault=True)
        broken.record_break("")
    for error, is_final in (
        (crashed.verdict(), True),
        (faulty.verdict(), True),
        (broken.verdict(), False),
        (rendering_failed(), True),
        (unavailable("Busy."), False),
    ):
        assert error.headers().get("x-should-retry") == ("false" if is_final else None)
        assert ("Retry-After" in error.headers()) == (error.status != 500 and not is_final)
