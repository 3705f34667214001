"""`/v1/responses` through a gateway: the numbers of events beyond a failure, tools that run elsewhere, and counts."""

from __future__ import annotations

import json
from typing import Any

from engine_behaviours import sends

from pagemill_api.answers.events import Content
from pagemill_api.dialects.base import FinishedChoice, Piece
from pagemill_api.dialects.openai_responses.responses import ResponsesDialect
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest, Usage

SEARCH = {"type": "web_search", "external_web_access": True}


def numbers_of(raw: bytes) -> list[int]:
    return [each["sequence_number"] for each in events_of(raw)]


def events_of(raw: bytes) -> list[Any]:
    datas = [line.removeprefix(b"data: ") for line in raw.splitlines() if line.startswith(b"data: ")]
    return [json.loads(data) for data in datas]


async def begins_and_breaks_off(engine: Any, request: GenerateRequest, response: Any, http: Any) -> None:
    renderer = ResponsesDialect().renderer(request, None)
    payload = renderer.chunk(Piece(0, "ab", True, None, None, None, [Content("a"), Content("b")]))
    meta = FrameMeta(token_ids=[1, 2], position=2, num_text_chars=2, num_events=renderer.num_events)
    await sends(encode_frame(meta, payload))(engine, request, response, http)


async def continues(_: Any, request: GenerateRequest, response: Any, http: Any) -> None:
    renderer = ResponsesDialect().renderer(request, None)
    await response.prepare(http)
    if not request.stream:
        body = renderer.body([FinishedChoice(0, "c", "stop")], Usage(1, 1))
        await response.write(encode_frame(FrameMeta(last=True, usage=Usage(1, 1), finish_reason="stop"), body))
        await response.write_eof()
        return
    if request.resume:
        renderer.resume(0, [Content("ab")], None)
    payload = renderer.chunk(Piece(0, "c", not request.resume, "stop", None, None, [Content("c")]))
    num_tokens = sum(len(each.token_ids) for each in request.resume)
    meta = FrameMeta(token_ids=[3], position=num_tokens + 1, num_text_chars=num_tokens + 1, finish_reason="stop")
    await response.write(encode_frame(meta, payload))
    last = FrameMeta(last=True, usage=Usage(1, num_tokens + 1), finish_reason="stop")
    await response.write(encode_frame(last, renderer.end(Usage(1, num_tokens + 1))))
    await response.write_eof()


async def respond(gateway: Any, **fields: Any) -> Any:
    return await gateway.post("/v1/responses", {"model": "tiny", "input": "hi", **fields})


async def test_a_stream_that_breaks_off_ends_with_the_failed_response(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = begins_and_breaks_off
    raw = (await respond(gateway, stream=True)).raw
    assert numbers_of(raw) == [*range(len(numbers_of(raw)))]
    first, last = events_of(raw)[0], events_of(raw)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "bad_upstream"
    assert last["response"]["id"] == first["response"]["id"]


async def test_a_stream_that_another_engine_continues_is_numbered_without_a_gap(engines, gateways) -> None:
    gateway = await gateways(*engines[:2])
    for engine in engines[:2]:
        engine.behaviours.append(begins_and_breaks_off)
        engine.behaviour = continues
    raw = (await respond(gateway, stream=True)).raw
    assert b"event: response.completed\n" in raw
    assert numbers_of(raw) == [*range(len(numbers_of(raw)))]


async def test_tools_that_run_elsewhere_are_named_or_refused(engines, gateways) -> None:
    engines[0].behaviour = continues
    reply = await respond(await gateways(engines[0]), tools=[SEARCH], client_metadata={"a": "b"})
    assert reply.status == 200
    named = "client_metadata, tools.external_web_access, tools[0] (web_search)"
    assert reply.headers["x-pagemill-unread-fields"] == named
    refused = await respond(await gateways(engines[0], hosted_tools="refuse"), tools=[SEARCH])
    assert (refused.status, refused.error["param"]) == (400, "tools[0].type")


async def test_the_tokens_of_a_prompt_are_counted_as_a_response_counts_them(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    engines[0].behaviour = continues
    tool = {"type": "custom", "name": "patch", "description": "Edits files."}
    fields = {"model": "tiny", "instructions": "Be brief.", "input": "hi", "tools": [tool]}
    counted = await gateway.post("/v1/responses/input_tokens", fields)
    assert counted.json["object"] == "response.input_tokens"
    await gateway.post("/v1/responses", fields)
    assert counted.json["input_tokens"] == len(engines[0].requests[-1].prompt_token_ids)
