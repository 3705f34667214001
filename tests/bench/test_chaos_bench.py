"""The benches of chaos and routing: counts of outcomes, and the HTTP requests of the traffic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from exact_load import ExactLoad
from gateway_routing import against_rivals, figures
from local_replicas import Up
from routers.chats import Chats, Reported, words
from routers.engines import settings
from waiting import eventually

from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_simulator.conversations import Conversation, Turn

NUM_TOKENS = 3


class Canned:
    """A server that answers every chat with its question in capitals, or in the way that `mode` sets."""

    def __init__(self) -> None:
        self.mode = "right"
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        text = body["messages"][-1]["content"].upper()
        if self.mode == "refused":
            return web.json_response({"error": {"message": "no"}}, status=503)
        if self.mode == "wrong":
            text += "!"
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"], "total_tokens": 10}
        usage["prompt_tokens_details"] = {"cached_tokens": 2}  # type: ignore[assignment]
        if not body.get("stream"):
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            return web.json_response({**_envelope("chat.completion"), "choices": [choice], "usage": usage})
        return await self._stream(request, text, usage)

    async def _stream(self, request: web.Request, text: str, usage: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece, reason in ((text[:5], None), (text[5:], "length")):
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": reason}
            await _send(response, {**_envelope("chat.completion.chunk"), "choices": [choice]})
            if self.mode == "reported":
                await _send(response, {"error": {"message": "The engine is gone.", "type": "server_error"}})
                return response
            if self.mode == "cut":
                assert request.transport is not None
                request.transport.abort()
                return response
        await _send(response, {**_envelope("chat.completion.chunk"), "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


def _envelope(kind: str) -> dict[str, Any]:
    return {"id": "x", "object": kind, "created": 1, "model": "m"}


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


@pytest.fixture
async def server() -> AsyncIterator[Canned]:
    canned = Canned()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", canned.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    canned.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    yield canned
    await runner.cleanup()


async def outcomes(server: Canned, mode: str) -> ExactLoad:
    """Return the outcomes of some answers of each form after the expected texts were recorded."""
    load = ExactLoad(server.url, "m", num_workers=2, num_tokens=NUM_TOKENS)
    try:
        await load.learn()
        server.mode = mode
        running = asyncio.create_task(load.run())
        await eventually(lambda: {each.streamed for each in load.records} == {True, False})
        load.stop()
        await running
    finally:
        await load.close()
    return load


@pytest.mark.parametrize(
    ("mode", "streamed", "whole"),
    [
        ("right", "complete", "complete"),
        ("wrong", "wrong", "wrong"),
        ("refused", "failed", "failed"),
        ("reported", "reported", "complete"),
        ("cut", "cut", "complete"),
    ],
)
async def test_outcomes_are_counted_by_the_form_of_the_answer(
    server: Canned, mode: str, streamed: str, whole: str
) -> None:
    load = await outcomes(server, mode)
    assert set(load.counts()) == {f"stream {streamed}", f"whole {whole}"}
    assert bool(load.faults) == (mode != "right")


async def test_half_of_the_prompts_are_sampled_with_a_seed(server: Canned) -> None:
    await outcomes(server, "right")
    assert {(body["temperature"], "seed" in body) for body in server.bodies} == {(0.0, False), (1.0, True)}


def test_the_url_is_read_from_the_output_of_the_command(tmp_path: Any) -> None:
    log = tmp_path / "log"
    up = Up(None, log)  # type: ignore[arg-type]
    log.write_text("smollm2-0: starting (0.1 s)\n")
    assert up.url is None
    log.write_text(
        "OpenAI base URL   http://127.0.0.1:81/v1\nStatus, metrics   http://a:1/status  http://a:1/metrics\n"
    )
    assert (up.url, up.metrics_url) == ("http://127.0.0.1:81", "http://a:1/metrics")


async def test_a_chat_sends_the_whole_conversation_and_measures_simulated_times(server: Canned) -> None:
    turns = [Turn([1, 2], NUM_TOKENS, 0.0), Turn([3], NUM_TOKENS, 0.0)]
    chats = Chats([server.url], [" a", " b", " c", " d"], slowdown=2.0)
    reported = await asyncio.to_thread(chats.run, [Conversation(0.0, [0, 0], turns)], 1)
    first, second = (body["messages"] for body in server.bodies)
    assert [each["role"] for each in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first
    assert second[2]["content"] == first[1]["content"].upper()
    assert len(set(first[0]["content"].split())) == 1
    assert (len(reported.ttft_ms), reported.num_cached_tokens, reported.faults) == (2, 4, [])


async def test_a_failed_answer_ends_its_chat_and_is_counted(server: Canned) -> None:
    server.mode = "refused"
    turns = [Turn([1], NUM_TOKENS, 0.0), Turn([2], NUM_TOKENS, 0.0)]
    chats = Chats([server.url], [" a", " b"], slowdown=1.0)
    reported = await asyncio.to_thread(chats.run, [Conversation(0.0, [], turns)], 1)
    assert figures(reported)["num_failed"] == len(server.bodies) == 1
    assert "503" in reported.faults[0]


@pytest.mark.model
def test_every_word_is_one_token() -> None:
    """`words` raises if a word has several tokens."""
    assert len(set(words())) == 4096


def test_the_engines_settings_are_valid() -> None:
    for name, kind in (("engine", EngineConfig), ("server", ServerConfig)):
        msgspec.convert(settings(8000, 8001, 4.0)[name], type=kind)


def test_our_policy_is_compared_with_the_best_rival_for_each_traffic() -> None:
    fast, slow = figures(Reported(ttft_ms=[10.0])), figures(Reported(ttft_ms=[40.0]))
    found = {"chat": {"pagemill Cost": fast, "smg": slow, "vllm-router": figures(Reported(ttft_ms=[20.0]))}, "hot": {}}
    assert against_rivals(found) == {"chat": 0.5}
