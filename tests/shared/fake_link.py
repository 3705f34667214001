"""The engine's end of a link, for fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
from aiohttp import web

from pagemill_protocol.link import (
    LINK_PROTOCOL,
    WINDOW_BYTES,
    RecordDecoder,
    RecordKind,
    Refusal,
    decode_number,
    encode_pieces,
    encode_record,
)
from pagemill_protocol.request.generate import GenerateRequest

HEAD = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {LINK_PROTOCOL}\r\n\r\n".encode()
Serve = Callable[[GenerateRequest, Any, Any], Awaitable[Any]]
"""Answers a request; the returned response is sent if none has begun."""


class LinkAnswer:
    """Replaces the `web.StreamResponse` of a behaviour, and the `web.Request` behind it."""

    def __init__(self, link: FakeLink, number: int, request: GenerateRequest, weights_digest: str) -> None:
        self.request = request
        self.weights_digest = weights_digest
        self.transport = link.transport
        self.begun = False
        self._link = link
        self._number = number
        self._credit = WINDOW_BYTES
        self._credited = asyncio.Event()

    async def prepare(self, _: Any) -> None:
        self.begun = True
        self._send(encode_record(RecordKind.ACCEPTED, self._number, self.weights_digest.encode()))

    async def write(self, data: bytes) -> None:
        while self._credit <= 0:
            self._credited.clear()
            await self._credited.wait()
        self._credit -= len(data)
        for record in encode_pieces(RecordKind.DATA, self._number, data):
            self._send(record)
        await asyncio.sleep(0)

    async def write_eof(self) -> None:
        self._send(encode_record(RecordKind.END, self._number))

    def refuse(self, response: web.Response) -> None:
        body = bytes(cast(bytes, response.body) or b"")
        refused = Refusal(response.status, body, response.headers.get("Retry-After"))
        self._send(encode_record(RecordKind.REFUSED, self._number, msgspec.msgpack.encode(refused)))

    def credited(self, num_bytes: int) -> None:
        self._credit += num_bytes
        self._credited.set()

    def _send(self, record: bytes) -> None:
        if self._link.is_lost:
            raise ConnectionResetError
        self.transport.write(record)


class FakeLink(asyncio.Protocol):
    """Takes over a connection of aiohttp's server."""

    def __init__(
        self,
        http: web.Request,
        serve: Serve,
        weights_digest: Callable[[], str],
        note_request_id: Callable[[str], None],
        raise_allowance: Callable[[GenerateRequest, int], None],
    ) -> None:
        assert http.transport is not None
        self.transport = cast(asyncio.Transport, http.transport)
        self.is_lost = False
        self.over = asyncio.Event()
        self._before = self.transport.get_protocol()
        self._serve = serve
        self._weights_digest = weights_digest
        self._raise_allowance = raise_allowance
        self._note_request_id = note_request_id
        self._decoder = RecordDecoder()
        self._parts: dict[int, bytes] = {}
        self._answers: dict[int, LinkAnswer] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.transport.write(HEAD)
        self.transport.set_protocol(self)

    def data_received(self, data: bytes) -> None:
        for kind, number, body in self._decoder.feed(data):
            if kind == RecordKind.REQUEST_PART:
                self._parts[number] = self._parts.get(number, b"") + body
            elif kind == RecordKind.REQUEST_ID:
                self._note_request_id(body.decode())
            elif kind == RecordKind.REQUEST:
                request = msgspec.msgpack.decode(self._parts.pop(number, b"") + body, type=GenerateRequest)
                answer = self._answers[number] = LinkAnswer(self, number, request, self._weights_digest())
                self._tasks[number] = asyncio.create_task(self._run(number, request, answer))
            elif kind == RecordKind.CANCEL and number in self._tasks:
                self._tasks[number].cancel()
            elif kind == RecordKind.CREDIT and number in self._answers:
                self._answers[number].credited(decode_number(body))
            elif kind == RecordKind.ALLOWANCE and number in self._answers:
                self._raise_allowance(self._answers[number].request, decode_number(body))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        for task in self._tasks.values():
            task.cancel()
        cast(asyncio.Protocol, self._before).connection_lost(error)
        self.over.set()

    async def _run(self, number: int, request: GenerateRequest, answer: LinkAnswer) -> None:
        try:
            response = await self._serve(request, answer, answer)
            if not answer.begun and isinstance(response, web.Response):
                answer.refuse(response)
        finally:
            del self._tasks[number], self._answers[number]
