"""The client of an engine's internal routes: one attempt, over the engine's shared link or over HTTP, and raises of
allowances.

It neither retries nor chooses engines, and parses only the framing. An engine that offers no link, or refuses it, gets
its requests over HTTP, each on its own connection (`engine_pool`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus

import msgspec

from pagemill_gateway.brain.interface import Assignment
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.engine_http.connecting import CannotConnect, Origin, origin_of, request_head
from pagemill_gateway.engine_http.engine_connection import EngineConnection
from pagemill_gateway.engine_http.engine_pool import EnginePool
from pagemill_gateway.relay.answer_stream import SILENCE_CHECKS, AnswerStream, AskLiveness, FrameStream
from pagemill_gateway.relay.attempt_failures import BROKE, MAX_ERROR_BYTES, SILENT, UpstreamFailure, refusal
from pagemill_gateway.relay.engine_link import MAX_DIGEST_CHARS, LinkTimeouts
from pagemill_gateway.relay.links import Links
from pagemill_protocol.frames import FRAMES_CONTENT_TYPE, MSGPACK_CONTENT_TYPE, WEIGHTS_HEADER
from pagemill_protocol.request.generate import AllowanceRaise
from pagemill_servers.tls.certificates import EngineTrust

ERROR_BODY_TIMEOUT_S = 5.0
ALLOWANCE_TIMEOUT_S = 2.0

_encoder = msgspec.msgpack.Encoder()


class Upstream:
    """The client of all engines. Create it inside a running event loop."""

    def __init__(self, config: GatewayConfig, idle_s: float) -> None:
        """`idle_s`: the time after which an unused HTTP connection is closed."""
        trust = EngineTrust(config.engine_tls.ca_file, config.engine_tls.server_name)
        timeouts = LinkTimeouts(config.accept_timeout_s, config.silence_timeout_s)
        self._links = Links(config.connect_timeout_s, trust, timeouts)
        self._pool = EnginePool(config.connect_timeout_s, idle_s, trust)
        self._accept_timeout_s = config.accept_timeout_s
        self._silence_timeout_s = config.silence_timeout_s

    async def close(self) -> None:
        await self._links.close()
        await self._pool.close()

    async def open(
        self,
        assignment: Assignment,
        body: bytes,
        request_id: str,
        liveness: AskLiveness,
        on_accepted: Callable[[], None],
    ) -> AnswerStream:
        """Send an encoded `GenerateRequest`, and return the stream of its answer, which the caller must close.

        `on_accepted` is called before the first frame can be read. This and the first read raise `UpstreamFailure`, or
        `PagemillError` for a request that no engine would accept.
        """
        if assignment.has_link:
            try:
                origin, token = origin_of(assignment.data_url), assignment.token
                link = self._links.ready(origin, token) or await self._links.open(origin, token)
            except (CannotConnect, OSError, ValueError) as error:
                raise _failure_of(error) from error
            if link is not None:
                return await link.send(body, request_id, liveness, on_accepted)
        origin, connection = await self._ask(assignment, body, request_id, liveness)
        # The pool keeps the connection only if the response was read to its end.
        release = partial(self._pool.release, origin, connection)
        try:
            await _check_accepted(connection)
        except BaseException:
            release()
            raise
        weights_digest = connection.header(WEIGHTS_HEADER.encode())[:MAX_DIGEST_CHARS]
        on_accepted()
        return FrameStream(connection, weights_digest, self._silence_timeout_s, liveness, release)

    async def raise_allowance(self, choice: Assignment, request_id: str, tokens: int) -> bool:
        """Raise the allowance of a request at its engine. Return whether the engine received it."""
        body = _encoder.encode(AllowanceRaise(request_id, tokens))
        try:
            async with asyncio.timeout(ALLOWANCE_TIMEOUT_S):
                origin = origin_of(choice.data_url)
                head = _head(origin, choice.token, request_id, len(body), "/internal/allowance")
                connection = await self._pool.take(origin)
                try:
                    await connection.ask(head, body)
                    await _bounded_body(connection)
                    return connection.status == HTTPStatus.NO_CONTENT
                finally:
                    self._pool.release(origin, connection)
        except (CannotConnect, OSError, ValueError):  # OSError includes timeouts
            return False

    async def _ask(
        self, assignment: Assignment, body: bytes, request_id: str, liveness: AskLiveness
    ) -> tuple[Origin, EngineConnection]:
        """Send a request over HTTP. Return its connection when the response's head has arrived."""
        try:
            async with asyncio.timeout(self._accept_timeout_s) as limit, self._watched(limit, liveness):
                origin = origin_of(assignment.data_url)
                head = _head(origin, assignment.token, request_id, len(body))
                connection = await self._pool.take(origin)
                try:
                    await connection.ask(head, body)
                except BaseException:
                    connection.abort()
                    raise
                return origin, connection
        except (CannotConnect, OSError, ValueError) as error:
            raise _failure_of(error) from error

    @asynccontextmanager
    async def _watched(self, limit: asyncio.Timeout, liveness: AskLiveness) -> AsyncIterator[None]:
        """End the wait for an engine's response early if its state stream is silent, too, or the engine is stuck."""
        loop = asyncio.get_running_loop()
        watching: list[asyncio.Task[None]] = []

        async def watch() -> None:
            while await liveness() == "working":  # noqa: ASYNC110 (there is no event to wait for)
                await asyncio.sleep(self._silence_timeout_s / SILENCE_CHECKS)
            if not limit.expired():
                limit.reschedule(loop.time())

        timer = loop.call_later(self._silence_timeout_s, lambda: watching.append(loop.create_task(watch())))
        try:
            yield
        finally:
            timer.cancel()
            for task in watching:
                task.cancel()


def _failure_of(error: CannotConnect | OSError | ValueError) -> UpstreamFailure:
    """Return the failure for an engine that was not reached, or that has not begun to respond."""
    if isinstance(error, CannotConnect):
        return UpstreamFailure("unreachable" if error.refused else "stalled", str(error))
    if isinstance(error, TimeoutError):
        return UpstreamFailure("stalled", SILENT)
    return UpstreamFailure("lost", BROKE)


def _head(origin: Origin, token: str, request_id: str, num_bytes: int, path: str = "/internal/generate") -> bytes:
    """Return the head of a request. Raises `ValueError` for invalid header values."""
    return request_head(
        f"POST {path}",
        origin,
        token,
        f"Content-Type: {MSGPACK_CONTENT_TYPE}",
        f"Content-Length: {num_bytes}",
        f"X-Request-Id: {request_id}",
    )


async def _check_accepted(connection: EngineConnection) -> None:
    """Raise the failure or the error of a refusal, if the engine has not accepted the request."""
    if connection.status == HTTPStatus.OK:
        content_type = connection.header(b"content-type").partition(";")[0].strip().lower()
        if content_type != FRAMES_CONTENT_TYPE:
            raise UpstreamFailure("broken", f"The engine answered {content_type[:80]!r} instead of frames.")
        return
    try:
        async with asyncio.timeout(ERROR_BODY_TIMEOUT_S):
            raw = await _bounded_body(connection)
    except OSError:  # including timeouts
        raw = b""
    raise refusal(connection.status, raw, connection.header(b"retry-after") or None)


async def _bounded_body(connection: EngineConnection) -> bytes:
    """Return the body; empty if it is too long."""
    body = b""
    while data := await connection.receive():
        body += data
        if len(body) > MAX_ERROR_BYTES:
            return b""
    return body
