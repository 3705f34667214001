"""Large answers pass a gateway in parts, as fast as their clients read; what is kept or stays unread is counted."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from waiting import WAIT_LIMIT_S, eventually

from pagemill_gateway.config import StoredResponsesConfig
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest, Usage
from pagemill_servers.auth import hash_key

LARGE = 24 * 2**20
"""More than the sockets of a connection hold."""
LAST = FrameMeta(last=True, usage=Usage(2, 1))


def keys() -> list[str]:
    return [f"{hash_key(f'sk-{name}')} tenant={name}" for name in ("greedy", "quiet")]


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}


def body_of(num_bytes: int, **fields: Any) -> bytes:
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    choices = [{"index": 0, "text": "x" * num_bytes, "finish_reason": "stop"}]
    return json.dumps({"id": "cmpl-1", "choices": choices, "usage": usage, **fields}, separators=(",", ":")).encode()


class Sending:
    """A behaviour that sends one payload in pieces, and counts what the gateway has taken."""

    def __init__(self, payload: bytes, *, meta: FrameMeta = LAST, after: bytes = b"") -> None:
        self.frame = encode_frame(meta, payload) + after
        self.num_sent = 0
        """The bytes of all answers that were sent."""
        self.breaks_at = len(self.frame) + 1

    async def __call__(self, _: Any, request: GenerateRequest, response: Any, http: Any) -> None:
        await response.prepare(http)
        for start in range(0, len(self.frame), 2**16):
            await response.write(self.frame[start : start + 2**16])
            self.num_sent += 2**16
            if start >= self.breaks_at:
                http.transport.abort()
                return
        await response.write_eof()


@asynccontextmanager
async def asking(url: str, name: str = "greedy", **fields: Any) -> AsyncIterator[asyncio.StreamReader]:
    """Ask for a completion over a connection that buffers little, and yield the unread answer."""
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.setblocking(False)
    address = urlsplit(url)
    await asyncio.get_running_loop().sock_connect(wire, (address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=wire, limit=2**16)
    body = json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode()
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer sk-{name}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    try:
        yield reader
    finally:
        writer.close()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Read the answer's head and body."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return await reader.readexactly(length)


async def stalled(sending: Sending) -> None:
    """Return when no byte was taken for a while: the client's connection and those to the engine are full."""
    before = -1
    while sending.num_sent != before:
        before = sending.num_sent
        await asyncio.sleep(0.3)


@pytest.mark.slow
async def test_a_large_body_follows_the_ends_of_its_choices(engines, gateways) -> None:
    """Engines report the tokens of a plain answer, so that it can be continued, before they send its body."""
    gateway = await gateways(engines[0])
    body = body_of(LARGE)
    reported = [FrameMeta(choice=choice, token_ids=[7], position=1, finish_reason="length") for choice in range(2)]
    engines[0].behaviour = sending = Sending(body)
    sending.frame = b"".join(encode_frame(meta, b"") for meta in reported) + sending.frame
    async with asking(gateway.url, n=2, max_tokens=1) as reader:
        assert await rest_of(reader) == body
    assert len(engines[0].requests) == 1


async def test_a_body_that_its_client_does_not_read_stays_at_the_engine(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    body = body_of(LARGE)
    engines[0].behaviour = sending = Sending(body)
    async with asking(gateway.url) as reader:
        await eventually(lambda: sending.num_sent > 0)
        await stalled(sending)
        assert sending.num_sent < LARGE // 2
        assert 0 < gateway.gateway.worker.in_flight_limit.num_bytes < 2**20
        assert await rest_of(reader) == body
    await eventually(lambda: gateway.gateway.worker.in_flight_limit.num_bytes == 0)


async def test_a_large_body_is_compressed_for_clients_that_accept_gzip(engines, gateways) -> None:
    body = body_of(2**20)
    engines[0].behaviour = Sending(body)
    gateway = await gateways(engines[0])
    reply = await gateway.complete(headers={"Accept-Encoding": "gzip"})
    assert reply.raw == body
    assert reply.headers["content-encoding"] == "gzip"
    reply = await gateway.complete(headers={"Accept-Encoding": "identity"})
    assert (reply.raw, reply.headers["content-length"]) == (body, str(len(body)))


async def test_an_engine_that_is_lost_within_a_body_ends_the_connection(engines, gateways) -> None:
    """Another engine may write the same answer differently, so half a body cannot be completed."""
    gateway = await gateways(*engines[:2])
    for engine in engines[:2]:
        engine.behaviour = Sending(body_of(LARGE))
        engine.behaviour.breaks_at = LARGE // 2
    with pytest.raises(aiohttp.ClientPayloadError):
        await gateway.complete()
    assert sum(len(engine.requests) for engine in engines[:2]) == 1
    engines[0].behaviour = engines[1].behaviour = Sending(body_of(10))
    assert (await gateway.complete()).status == 200


async def test_a_large_event_passes_in_parts(engines, gateways) -> None:
    event = b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % (b"x" * LARGE)
    done = encode_frame(LAST, b"data: [DONE]\n\n")
    engines[0].behaviour = sending = Sending(event, meta=FrameMeta(token_ids=[1], position=1), after=done)
    gateway = await gateways(engines[0])
    async with asking(gateway.url, stream=True):
        await eventually(lambda: sending.num_sent > 0)
        await stalled(sending)
        assert sending.num_sent < LARGE // 2
    reply = await gateway.complete(stream=True)
    assert reply.raw == event + b"data: [DONE]\n\n"


async def test_an_event_that_is_cut_off_is_not_followed_by_another(engines, gateways) -> None:
    event = b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % (b"x" * LARGE)
    engines[0].behaviour = Sending(event, meta=FrameMeta(token_ids=[1], position=1))
    engines[0].behaviour.breaks_at = LARGE // 2
    gateway = await gateways(engines[0])
    with pytest.raises(aiohttp.ClientPayloadError):
        await gateway.complete(stream=True)


async def test_answers_that_must_be_whole_are_counted_and_refused_beyond_the_limit(engines, gateways) -> None:
    gateway = await gateways(engines[0], max_in_flight_body_bytes=8 * 2**20, api_keys=keys())
    engines[0].behaviour = Sending(body_of(6 * 2**20))
    reply = await gateway.complete(prompt=["a", "b"], headers=bearer("greedy"))
    assert reply.status == 429
    assert (reply.error["code"], reply.headers["retry-after"]) == ("tenant_share_exceeded", "1")
    assert gateway.gateway.worker.in_flight_limit.num_bytes == 0
    engines[0].behaviour = Sending(body_of(100_000))
    assert (await gateway.complete(prompt=["a", "b"], headers=bearer("greedy"))).status == 200


@pytest.mark.slow
async def test_unread_answers_of_a_tenant_end_the_longest_unread_and_none_of_others(engines, gateways) -> None:
    """Each unread answer counts for 0.6 MB, so that the tenant's share is for twelve."""
    gateway = await gateways(engines[0], max_in_flight_body_bytes=8 * 2**20, api_keys=keys())
    limit = gateway.gateway.worker.in_flight_limit
    body = body_of(LARGE)
    engines[0].behaviour = Sending(body)
    async with asking(gateway.url, "quiet") as other:
        await eventually(lambda: limit.num_bytes > 0)
        readers, contexts = [], []
        for _ in range(14):
            contexts.append(context := asking(gateway.url))
            readers.append(await context.__aenter__())
        await eventually(lambda: len(engines[0].requests) == 15)
        await eventually(lambda: limit.num_in_flight <= 13)
        assert limit.num_bytes <= 8 * 2**20
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await rest_of(readers[0])
        assert await rest_of(readers[-1]) == body
        assert await rest_of(other) == body
        for context in contexts:
            await context.__aexit__(None, None, None)
    await eventually(lambda: limit.num_bytes == 0)


@pytest.mark.parametrize(("num_bytes", "is_stored"), [(100_000, True), (2**20, False)])
async def test_a_response_is_kept_whole_only_as_far_as_it_may_be_stored(
    engines, gateways, num_bytes: int, is_stored: bool
) -> None:
    config = StoredResponsesConfig(max_response_bytes=500_000)
    gateway = await gateways(engines[0], stored_responses=config)
    body = json.dumps({"id": "resp_1", "output": [{"type": "message", "content": "x" * num_bytes}]}).encode()
    engines[0].behaviour = Sending(body)
    reply = await gateway.post("/v1/responses", {"model": "tiny", "input": "hi"})
    assert (reply.status, reply.raw) == (200, body)
    assert (await gateway.get("/v1/responses/resp_1")).status == (200 if is_stored else 404)


async def test_an_unread_stored_response_is_counted_until_it_is_read(engines, gateways) -> None:
    num_bytes = 20 * 2**20
    gateway = await gateways(
        engines[0], stored_responses=StoredResponsesConfig(max_bytes=2**26, max_response_bytes=2**25)
    )
    engines[0].behaviour = Sending(json.dumps({"id": "resp_1", "output": [{"text": "x" * num_bytes}]}).encode())
    assert (await gateway.post("/v1/responses", {"model": "tiny", "input": "hi"})).status == 200
    limit = gateway.gateway.worker.in_flight_limit
    address = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**16)
    writer.write(b"GET /v1/responses/resp_1 HTTP/1.1\r\nHost: gateway\r\n\r\n")
    await reader.readuntil(b"\r\n")
    await eventually(lambda: limit.num_bytes >= num_bytes)
    assert limit.num_in_flight == 1
    writer.close()
    await eventually(lambda: (limit.num_in_flight, limit.num_bytes) == (0, 0))
