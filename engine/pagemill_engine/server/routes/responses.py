"""ASGI responses that send an `Answer`: as SSE, as one JSON body, or as frames for a gateway.

Each watches for the client's disconnect while it waits, and calls `on_disconnect` at once, so that the engine frees the
request's blocks before its next step. The first frame of a public answer decides its status: an error before any output
is a plain JSON error, a later one an SSE error event. Gateways get their status before the first token: it says that
the engine accepted the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from starlette.types import Receive, Scope, Send

from pagemill_api.dialects.base import Dialect
from pagemill_api.dialects.registry import dialect_of
from pagemill_api.openai import render
from pagemill_engine.output.processor import Frame
from pagemill_engine.server.answer import Answer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.json_pieces import in_blocks, pieces_of
from pagemill_protocol.request.generate import GenerateRequest, Usage

JSON_CONTENT_TYPE = "application/json"
SLICE_S = 0.005
"""Time of one slice of work on a large body, between two of which the event loop serves others."""
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class AnswerResponse:
    """Base class: handles disconnects and the end. Subclasses write status and bytes in `_respond`."""

    def __init__(
        self,
        requests: list[GenerateRequest],
        answer: Answer,
        on_disconnect: Callable[[], None],
        headers: Mapping[str, str] = {},
    ) -> None:
        """Make the response. `headers`: those of an answer besides the ones that its kind has."""
        self.requests = requests
        self.answer = answer
        self._on_disconnect = on_disconnect
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await self._respond(send)
        finally:
            watcher.cancel()
            self._release()

    async def _respond(self, send: Send) -> None:
        raise NotImplementedError

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._release()

    def _release(self) -> None:
        """Release the answer after a disconnect. After a complete answer this does nothing."""
        self.answer.close()
        self._on_disconnect()


class StreamResponse(AnswerResponse):
    """Server-sent events. Several prompts of one request are merged into one stream with one end."""

    async def _respond(self, send: Send) -> None:
        frames = await self.answer.take()
        if not frames:
            return
        if self.answer.error is not None and frames[0].meta.error is not None:
            await _send_error(send, self.answer.error, dialect_of(self.requests[0].dialect))
            return
        stream_type = dialect_of(self.requests[0].dialect).transport.stream_type
        await _start(send, 200, {"content-type": stream_type, **_STREAM_HEADERS, **self._headers})
        usages: list[Usage] = []
        while frames:
            await _send_bytes(send, b"".join(self._payloads(frames, usages)))
            frames = await self.answer.take()
        await _send_bytes(send, self._merged_end(usages), more=False)

    def _payloads(self, frames: list[Frame], usages: list[Usage]) -> Iterable[bytes]:
        for frame in frames:
            if not frame.meta.last or frame.meta.error is not None or len(self.requests) == 1:
                yield frame.payload
            elif frame.meta.usage is not None:
                usages.append(frame.meta.usage)

    def _merged_end(self, usages: list[Usage]) -> bytes:
        if len(self.requests) == 1 or self.answer.error is not None:
            return b""
        first = self.requests[0]
        return dialect_of(first.dialect).merged_end(first, render.add_usage(*usages))


class BodyResponse(AnswerResponse):
    """One JSON body, sent when the answer is complete, as fast as the client reads it."""

    async def _respond(self, send: Send) -> None:
        dialect, answer = dialect_of(self.requests[0].dialect), self.answer
        await answer.wait_end()
        if len(self.requests) > 1 and answer.error is None:
            num_bytes, first = await self._merge(dialect), b""
        else:
            frames = answer.get_nowait()
            num_bytes, first = (frames[0].num_bytes, frames[0].payload) if frames else (0, b"")
        if answer.error is not None:
            await _send_error(send, answer.error, dialect)
            return
        if not num_bytes:  # the client disconnected
            return
        headers = {**dialect.transport.body_headers(first), "content-length": str(num_bytes), **self._headers}
        await _start(send, 200, headers)
        num_sent = 0
        for block in in_blocks(chain([first], iter(answer.next_piece, None))):
            num_sent += len(block)
            await _send_bytes(send, block, more=num_sent < num_bytes)

    async def _merge(self, dialect: Dialect) -> int:
        """Merge the bodies of several prompts, in slices of time. Return the number of bytes; 0 if there are none."""
        bodies = self.answer.take_bodies()
        if len(bodies) < len(self.requests):
            return 0
        pieces: list[bytes] = []
        began = time.monotonic()
        for piece in pieces_of(dialect.merge_bodies(bodies)):
            pieces.append(piece)
            if time.monotonic() - began > SLICE_S:
                await asyncio.sleep(0)
                began = time.monotonic()
        self.answer.replace(pieces)
        return sum(map(len, pieces))


def encoded(frame: Frame) -> bytes:
    """Return a frame for a gateway, without its further pieces."""
    return encode_frame(frame.meta, frame.payload, frame.num_bytes if frame.rest else None)


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def _send_bytes(send: Send, body: bytes, more: bool = True) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def _send_error(send: Send, error: PagemillError, dialect: Dialect) -> None:
    body = dialect.error_body(error)
    headers = {"content-type": JSON_CONTENT_TYPE, "content-length": str(len(body)), **error.headers()}
    await _start(send, error.status, headers)
    await _send_bytes(send, body, more=False)
