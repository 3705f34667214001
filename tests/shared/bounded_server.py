"""A server in this process whose connections are bounded (`pagemill_servers.connection`), and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import orjson
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from waiting import WAIT_LIMIT_S

from pagemill_servers.connection import bounded_protocol
from pagemill_servers.connection_limits import ConnectionLimits
from pagemill_servers.process.listening import open_listener
from pagemill_servers.request_middleware import RequestMiddleware, read_body


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body."""
    body = await read_body(receive)
    await Response(body or b"ok")(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(
    header_timeout_s: float = 5.0,
    inner: ASGIApp = echo,
    *,
    limits: ConnectionLimits | None = None,
    write_timeout_s: float = 5.0,
    max_body_bytes: int = 100_000,
    host: str = "127.0.0.1",
) -> AsyncIterator[int]:
    """Yield the port of a server whose heads are limited to 8 KiB."""
    app = RequestMiddleware(inner, max_body_bytes=max_body_bytes, max_header_bytes=8192)
    config = uvicorn.Config(
        app,
        http=bounded_protocol(
            max_header_bytes=8192, header_timeout_s=header_timeout_s, limits=limits, write_timeout_s=write_timeout_s
        ),
        lifespan="off",
        ws="none",
        log_config=None,
    )
    server = uvicorn.Server(config)
    with open_listener(host, 0) as listener:
        task = asyncio.create_task(server._serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def exchange(port: int, *pieces: bytes, end: bool = False) -> bytes:
    """Send the pieces as far as the server accepts them; return its answer until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if end:
                writer.write_eof()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(WAIT_LIMIT_S):
                while data := await reader.read(65536):
                    answer += data
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return answer


def error_of(answer: bytes) -> tuple[int, str]:
    """Return the status and the code of a refusal that closes its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert re.search(rb"\r\nx-request-id: [A-Za-z0-9._:-]+(\r\n|$)", head), "every answer must have an id"
    return int(head.split()[1]), orjson.loads(body)["error"]["code"]
