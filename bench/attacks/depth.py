"""Attacks by nesting: bodies of a few hundred bytes whose levels exhaust some renderer, template or schema compiler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from attacks.answers import MESSAGES
from attacks.cases import case, expect
from attacks.connections import key_at
from attacks.site import ATTACKER, TOKEN, Site
from attacks.wire import Answer, ask, exchange, head
from pagemill_protocol.versions import PROTOCOL_HEADER, PROTOCOL_VERSION

LEVELS = (101, 120, 251, 400, 900, 1020)
"""All above the limit of 100; renderers, compilers and decoders of other libraries have theirs in between."""


def nested(levels: int, innermost: Any = "string") -> dict[str, Any]:
    """Return a schema of an object in an object and so on; `levels` counts the braces."""
    schema: dict[str, Any] = {"type": innermost}
    for _ in range((levels - 1) // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def bodies(levels: int) -> Iterator[tuple[str, dict[str, Any]]]:
    deep = nested(levels)
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
    named = {"name": "s", "schema": deep}
    yield (
        "/v1/responses",
        {
            "model": "tiny",
            "input": "x",
            "max_output_tokens": 2,
            "tools": [{"type": "function", "name": "f", "parameters": deep}],
        },
    )
    yield "/v1/chat/completions", {**chat, "tools": [tool]}
    yield "/v1/chat/completions", {**chat, "response_format": {"type": "json_schema", "json_schema": named}}
    yield "/v1/chat/completions", {**chat, "an_unknown_field": deep}
    yield "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2, "structured_outputs": {"json": deep}}
    yield "/v1/messages", {**chat, "tools": [{"name": "f", "input_schema": deep}]}
    yield "/api/chat", {**chat, "format": deep}
    yield "/api/chat", {**chat, "tools": [tool]}
    yield "/generate", {"inputs": "x", "parameters": {"grammar": {"type": "json", "value": deep}}}
    yield "/v2/models/tiny/generate", {"text_input": "x", "max_tokens": 2, "parameters": {"a": deep}}
    yield "/tokenize", {**chat, "tools": [tool]}


@case("depth", "gateway data", "engine data")
async def bodies_are_nested(site: Site, port: str) -> str:
    """Every dialect refuses every depth with 400 before it generates; and a hundred of them use up nothing."""
    levels = LEVELS if site.whole_grid else LEVELS[::2]
    asked = [(path, body) for depth in levels for path, body in bodies(depth)]
    for path, body in asked:
        answer = await ask(site.url(port), path, body, key_at(port))
        status = answer.status if answer else None
        depth = json.dumps(body).count("{")
        expect(status == 400, f"{path} with {depth} braces: {status}, {answer.body[:200] if answer else b''!r}")
    path, body = asked[0]
    answers = await asyncio.gather(*(ask(site.url(port), path, body, key_at(port)) for _ in range(20)))
    expect(all(each and each.status == 400 for each in answers), "one of twenty deep bodies at once got no 400")
    return f"{len(asked)} bodies"


@case("depth", "gateway control", "engine control")
async def bodies_for_control_ports_are_nested(site: Site, port: str) -> str:
    path, method = ("/catalog", "PUT") if port.startswith("gateway") else ("/wake_up", "POST")
    for depth in (101, 1_000, 100_000, 3_000_000):
        raw = b'{"models": ' + b"[" * depth + b"]" * depth + b"}"
        answer = await ask(site.url(port), path, raw, TOKEN) if method == "POST" else await put(site, port, raw)
        status = answer.status if answer else None
        expect(status is not None and status < 500, f"{path} with {depth} levels: {status}")
    return ""


async def put(site: Site, port: str, raw: bytes) -> Answer | None:
    version = f"{PROTOCOL_HEADER}: {PROTOCOL_VERSION}"
    asked = head("/catalog", TOKEN, method="PUT", length=len(raw), fields=[version])
    return await exchange(site.url(port), asked + raw)


@case("depth", "gateway data")
async def brackets_alone(site: Site, port: str) -> str:
    for depth in (101, 1024, 100_000, 4_000_000):
        for raw in (b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth):
            answer = await ask(site.url(port), "/v1/chat/completions", raw, ATTACKER)
            expect(
                answer and 400 <= answer.status < 500, f"{depth} of {raw[:5]!r}: {answer.status if answer else None}"
            )
    return ""
