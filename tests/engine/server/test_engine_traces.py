"""An engine without a gateway exports its own traces: the server's span with the phases of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from otlp_receiver import CLIENT_SPAN, SAMPLED, TRACE_ID, UNSAMPLED, Receiver, receiving
from waiting import WAIT_LIMIT_S

MODEL = "SmolLM2-135M-Instruct"
ROUTE = "POST /v1/chat/completions"
ENGINE = "pagemill-engine"


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as found:
        yield found


async def ask(server: Any, headers: dict[str, str], **fields: Any) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "secret words"}], "max_tokens": 4, **fields}
    async with (
        aiohttp.ClientSession(server.url) as client,
        client.post("/v1/chat/completions", json=body, headers=headers) as reply,
    ):
        await reply.read()
        return reply.status


async def ready(start_server: Any, receiver: Receiver) -> Any:
    server = start_server(server={"tracing": {"endpoint": receiver.url}})
    await asyncio.to_thread(server.wait_for, "ready")
    return server


async def ended(server: Any) -> None:
    """Wait until the engine has ended, because it sends its last spans before that."""
    server.process.terminate()
    async with asyncio.timeout(WAIT_LIMIT_S):
        assert await asyncio.to_thread(server.wait_exit) == 0


async def test_a_request_to_an_engine_is_a_server_span_with_the_phases_of_its_answer(start_server, receiver) -> None:
    server = await ready(start_server, receiver)
    assert await ask(server, SAMPLED, stream=True, temperature=0.5, seed=3) == 200
    await ended(server)
    (root,) = receiver.named(ROUTE, ENGINE)
    phases = [receiver.named(name, ENGINE)[0] for name in ("queue", "prefill", "decode")]
    assert {span["trace"] for span in receiver.spans} == {TRACE_ID}
    assert root["parent"] == CLIENT_SPAN
    assert {span["parent"] for span in phases} == {root["id"]}
    assert root["start"] <= phases[0]["start"]
    assert [span["end"] for span in phases[:2]] == [span["start"] for span in phases[1:]]
    assert phases[2]["start"] < phases[2]["end"] <= root["end"]
    assert (
        root["attributes"].items()
        >= {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "pagemill",
            "gen_ai.request.model": MODEL,
            "gen_ai.request.max_tokens": 4,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": 3,
            "gen_ai.request.stream": True,
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.output_tokens": 4,
        }.items()
    )
    assert {"gen_ai.response.id", "gen_ai.usage.input_tokens", "pagemill.request_id", "pagemill.ttft_ms"} <= set(
        root["attributes"]
    )
    assert "secret" not in str(receiver.spans)


async def test_refusals_are_traced_with_their_error_and_unsampled_requests_are_not(start_server, receiver) -> None:
    server = await ready(start_server, receiver)
    assert await ask(server, UNSAMPLED) == 200
    assert await ask(server, {}, max_tokens=-1) == 400
    await ended(server)
    (root,) = receiver.spans
    assert root["failed"]
    assert root["parent"] == ""
    assert root["attributes"]["http.response.status_code"] == 400
    assert root["attributes"]["error.type"]


def test_a_receiver_that_is_not_a_url_is_refused(start_server) -> None:
    server = start_server(server={"tracing": {"endpoint": "collector:4317"}})
    assert server.wait_exit() == 1
    assert "tracing.endpoint: 'collector:4317' does not begin with http://" in server.stderr()
