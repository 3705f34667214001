"""Attacks by answers that are larger than requests: log probabilities, echoes, and unread streams."""

from __future__ import annotations

import asyncio
from typing import Any

from attacks.cases import case, expect
from attacks.connections import key_at
from attacks.site import Site
from attacks.wire import SMALL_BUFFER_BYTES, answering, ask, post, wires

NUM_CHOICES, NUM_TOP = 128, 20
MAX_VALUES = 2_000_000
"""The default bound of choices x log probabilities x tokens."""
LONG_TOKEN = 45_855
"""A token of 80 characters, so that an answer is 13 times as long as the ids of its prompt."""
LONG = [LONG_TOKEN] * 8_000
"""0.64 MB of text in 56 kB."""
MESSAGES = [{"role": "user", "content": "x"}]
NUM_ECHOES, NUM_STREAMS = 40, 60
ANSWER_LIMIT_S = 60.0
SEND_LIMIT_S, START_LIMIT_S = 5.0, 15.0


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, "ignore_eos": True, **fields}


@case("values", "gateway data", "engine data")
async def one_request_wants_more_values_than_may_be(site: Site, port: str) -> str:
    """The product is refused by the names of its fields; each field's largest value alone is served."""
    key, path = key_at(port), "/v1/chat/completions"
    wide = {"n": NUM_CHOICES, "logprobs": True, "top_logprobs": NUM_TOP}
    answer = await ask(site.url(port), path, chat(**wide, max_tokens=1000), key, ANSWER_LIMIT_S)
    expect(answer and answer.status == 400, f"2,560,000 values: {answer.status if answer else None}")
    assert answer is not None
    message = answer.error()["message"]
    expect(all(name in message for name in ("n", "top_logprobs", "max_tokens")), f"the refusal: {message}")
    for allowed in ({"n": NUM_CHOICES, "max_tokens": 20}, {**wide, "n": 1, "max_tokens": 20}):
        answer = await ask(site.url(port), path, chat(**allowed), key, ANSWER_LIMIT_S)
        expect(answer and answer.status == 200, f"{allowed}: {answer.status if answer else None}")
    return ""


@case("values", "gateway data", only_grid=("engine data",))
async def one_request_wants_as_many_values_as_may_be(site: Site, port: str) -> str:
    tokens = MAX_VALUES // (NUM_CHOICES * (NUM_TOP + 1)) if site.whole_grid else 200
    body = chat(n=NUM_CHOICES, logprobs=True, top_logprobs=NUM_TOP, max_tokens=tokens)
    answer = await ask(site.url(port), "/v1/chat/completions", body, key_at(port), ANSWER_LIMIT_S)
    expect(answer and answer.status == 200, f"{tokens} tokens: {answer.status if answer else None}")
    assert answer is not None
    return f"{len(answer.body) / 1e6:.0f} MB"


@case("values", only_grid=("gateway data", "engine data"))
async def many_prompts_want_many_values(site: Site, port: str) -> str:
    body = {"model": "tiny", "prompt": ["x"] * 16, "n": NUM_CHOICES, "logprobs": NUM_TOP, "max_tokens": 45}
    answers = await asyncio.gather(
        *(ask(site.url(port), "/v1/completions", body, key_at(port), ANSWER_LIMIT_S) for _ in range(4))
    )
    return f"statuses {[each.status if each else None for each in answers]}"


@case("answers", "gateway data", "engine data")
async def echoed_prompts_are_not_read(site: Site, port: str) -> str:
    return await unread(site, port, NUM_ECHOES, echoed(), SMALL_BUFFER_BYTES)


@case("answers", only_grid=("gateway data", "engine data"))
async def echoed_prompts_as_long_as_the_context_are_not_read(site: Site, port: str) -> str:
    """Each answer is 1.3 GB."""
    return await unread(site, port, 4, echoed(prompt=[LONG_TOKEN] * 130_000), SMALL_BUFFER_BYTES)


@case("answers", only_grid=("gateway data", "engine data"))
async def echoed_prompts_are_read_slowly(site: Site, port: str) -> str:
    request = post("/v1/completions", echoed(), key_at(port))
    async with wires(site.url(port), NUM_ECHOES) as opened:
        await asyncio.gather(*(each.send(request, site.hold_s) for each in opened))
        await asyncio.gather(*(_slowly(each, 3 * site.hold_s) for each in opened))
    return ""


async def _slowly(wire: Any, seconds: float) -> None:
    for _ in range(int(seconds)):
        await wire.read(0.2, 200_000)
        await asyncio.sleep(0.8)


def echoed(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": LONG, "echo": True, "n": NUM_CHOICES, "max_tokens": 1, **fields}


@case("streams", "gateway data", "engine data")
async def streams_of_echoed_prompts_are_not_read(site: Site, port: str) -> str:
    return await unread(site, port, NUM_ECHOES, echoed(stream=True), SMALL_BUFFER_BYTES)


@case("streams", "engine data", only_grid=("gateway data",))
async def streams_of_log_probabilities_are_not_read(site: Site, port: str) -> str:
    body = {"model": "tiny", "prompt": "x", "n": 16, "logprobs": NUM_TOP, "max_tokens": 5000, "ignore_eos": True}
    return await unread(site, port, NUM_STREAMS, {**body, "stream": True}, SMALL_BUFFER_BYTES)


@case("streams", only_grid=("gateway data", "engine data"))
async def many_narrow_streams_are_not_read(site: Site, port: str) -> str:
    """Overhead for each piece, rather than bytes."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    return await unread(site, port, 1000, body, SMALL_BUFFER_BYTES)


async def unread(site: Site, port: str, number: int, body: dict[str, Any], buffer_bytes: int) -> str:
    """Keep the requests unread for some time after a quarter of them has begun to answer."""
    request = post("/v1/completions", body, key_at(port))
    async with wires(site.url(port), number, buffer_bytes=buffer_bytes) as opened:
        await asyncio.gather(*(each.send(request, SEND_LIMIT_S) for each in opened))
        await answering(opened, number // 4, START_LIMIT_S)
        await asyncio.sleep(2 * site.hold_s)
        return f"statuses {await answering(opened, 0, 1.0)}"


@case("values", only_grid=("engine data",))
async def many_prompts_of_one_body(site: Site, port: str) -> str:
    body = {"model": "tiny", "prompt": ["x"] * 1024, "n": NUM_CHOICES, "max_tokens": 10_000}
    return await unread(site, port, 20, body, SMALL_BUFFER_BYTES)
