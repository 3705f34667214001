"""Behaviours of fake engines for one request: a proper answer, or one of the faults of real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from generating import answer_frames

from pagemill_protocol.request.generate import GenerateRequest

Behaviour = Callable[[Any, GenerateRequest, web.StreamResponse, web.Request], Awaitable[None]]


class Refused(Exception):
    def __init__(self, response: web.Response) -> None:
        self.response = response


def says(*pieces: str, gate: asyncio.Event | None = None) -> Behaviour:
    """Answer properly. With `gate`, send only the first frame before it opens.

    The last frame is always withheld until then, because a complete answer would leave the engine.
    """

    async def behave(_: Any, request: GenerateRequest, response: web.StreamResponse, http: web.Request) -> None:
        frames = answer_frames(request, pieces)
        await response.prepare(http)
        if gate is not None:
            if len(frames) > 1:
                await response.write(frames.pop(0))
            await gate.wait()
        for frame in frames:
            await response.write(frame)
        await response.write_eof()

    return behave


def refuses(status: int, *, retry_after: str | None = None, **error: Any) -> Behaviour:
    async def behave(_: Any, request: GenerateRequest, response: web.StreamResponse, http: web.Request) -> None:
        headers = {"Retry-After": retry_after} if retry_after else {}
        body = {"error": {"message": f"refused with {status}", "type": "t", "param": None, "code": None, **error}}
        raise Refused(web.json_response(body, status=status, headers=headers))

    return behave


def breaks_off(num_frames: int, *pieces: str) -> Behaviour:
    """Send the first frames of a proper answer, then reset the connection."""

    async def behave(_: Any, request: GenerateRequest, response: web.StreamResponse, http: web.Request) -> None:
        await response.prepare(http)
        for frame in answer_frames(request, pieces or ("a", "b", "c"))[:num_frames]:
            await response.write(frame)
        await asyncio.sleep(0.02)
        assert http.transport is not None
        http.transport.abort()

    return behave


def sends(*chunks: bytes) -> Behaviour:
    """Send these bytes, whatever they are, and end properly."""

    async def behave(_: Any, request: GenerateRequest, response: web.StreamResponse, http: web.Request) -> None:
        await response.prepare(http)
        for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()

    return behave


async def hangs(_: Any, request: GenerateRequest, response: web.StreamResponse, http: web.Request) -> None:
    """Accept the request and then send nothing."""
    await response.prepare(http)
    await asyncio.Event().wait()
