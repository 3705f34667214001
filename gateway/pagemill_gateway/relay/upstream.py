"""The client side of `/internal/generate` and `/internal/allowance`: one attempt at one engine, its frames checked, its
failures classified.

It neither retries nor chooses (`relay.relay` does) and does not parse payloads beyond their framing: it passes on
either complete frames of a well-formed answer, or an `UpstreamFailure`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Protocol

import msgspec

from pagemill_gateway.brain.interface import Assignment, FailureKind, Liveness
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.relay.engine_connection import EngineConnection
from pagemill_gateway.relay.engine_pool import CannotConnect, EnginePool, Origin, origin_of
from pagemill_gateway.repeated_timeout import RepeatedTimeout
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.frames import (
    FRAMES_CONTENT_TYPE,
    MSGPACK_CONTENT_TYPE,
    WEIGHTS_HEADER,
    FrameDecoder,
    FrameError,
)
from pagemill_protocol.generate import AllowanceRaise, FrameMeta
from pagemill_protocol.http.tls import EngineTrust
from pagemill_protocol.versions import PROTOCOL_HEADER, PROTOCOL_VERSION

MAX_ERROR_BYTES = 64 * 1024
MAX_DIGEST_CHARS = 256
ERROR_BODY_TIMEOUT_S = 5.0
END_OF_BODY_TIMEOUT_S = 0.5
ALLOWANCE_TIMEOUT_S = 2.0
SILENCE_CHECKS = 4
"""In one silence timeout, and as many in a row must find the engine silent: a time in which this process itself did not
run counts as one."""
REFUSALS = frozenset({409, 429, 503})
DECLINES = frozenset({"draining", "not_ready"})
"""Codes of refusals that hold for every request: the engine is shutting down, or has restarted and still loads."""
CLIENT_FAULTS = frozenset({400, 413, 422})
SILENT = "An engine fell silent."
BROKE = "The connection to an engine broke."

_encoder = msgspec.msgpack.Encoder()

Frame = tuple[FrameMeta, bytes]
AskLiveness = Callable[[], Awaitable[Liveness]]
"""What is known of the engine, which sends nothing here."""


class UpstreamFailure(Exception):
    """The attempt failed and brings no answer; another engine may serve the request."""

    def __init__(self, kind: FailureKind, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message = message
        self.retry_after_s = retry_after_s


class Body(Protocol):
    """The body of an answer, as `EngineConnection` gives it."""

    async def receive(self) -> bytes:
        """The next bytes; none after the last. Raises `OSError` when the connection breaks."""
        ...


class FrameStream:
    """The frames of one answer in the groups in which the network brought them."""

    def __init__(self, body: Body, weights_digest: str, silence_timeout_s: float, liveness: AskLiveness) -> None:
        self.weights_digest = weights_digest
        """Of the weights that make the answer; empty: the engine does not report it."""
        self.waited_s = 0.0
        """In `read`, for the engine."""
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._liveness = liveness
        self._timeout = RepeatedTimeout(silence_timeout_s / SILENCE_CHECKS)
        self._decoder = FrameDecoder()
        self._complete = False

    async def read(self) -> list[Frame]:
        """The next frames, at least one; an empty list after the last. Raises `UpstreamFailure`."""
        try:
            while data := await self._receive():
                frames = self._decoder.feed(data)
                self._check(frames)
                if frames:
                    return frames
            self._decoder.close()
        except FrameError as error:
            raise UpstreamFailure("broken", f"The engine sent garbage: {error}") from error
        except TimeoutError as error:
            raise UpstreamFailure("stalled", SILENT) from error
        except OSError as error:
            raise UpstreamFailure("lost", BROKE) from error
        if not self._complete:
            raise UpstreamFailure("lost", "The engine's answer ended before its last frame.")
        return []

    def close(self) -> None:
        self._timeout.close()

    async def finish(self) -> None:
        """After the last frame: take the end of the body, so that the connection can be used again."""
        with suppress(OSError):  # a time-out is one too
            async with asyncio.timeout(END_OF_BODY_TIMEOUT_S):
                await self._body.receive()

    async def _receive(self) -> bytes:
        """The next bytes. Raises `TimeoutError` once the engine has sent nothing for too long, here and on its state
        stream.
        """
        started = self._loop.time()
        num_silent = 0
        try:
            while True:
                try:
                    return await self._timeout.wait(self._body.receive())
                except TimeoutError:
                    liveness = await self._liveness()
                    num_silent = num_silent + 1 if liveness == "silent" else 0
                    if liveness == "stuck" or num_silent >= SILENCE_CHECKS:
                        raise
        finally:
            self.waited_s += self._loop.time() - started

    def _check(self, frames: list[Frame]) -> None:
        for meta, _ in frames:
            if self._complete:
                raise FrameError("a frame follows the last one")
            self._complete = meta.last


class Upstream:
    """Create inside a running event loop."""

    def __init__(self, config: GatewayConfig, idle_s: float) -> None:
        """`idle_s`: how long an unused connection is kept."""
        trust = EngineTrust(config.engine_tls.ca_file, config.engine_tls.server_name)
        self._pool = EnginePool(config.connect_timeout_s, idle_s, trust)
        self._accept_timeout_s = config.accept_timeout_s
        self._silence_timeout_s = config.silence_timeout_s

    async def close(self) -> None:
        await self._pool.close()

    @asynccontextmanager
    async def generate(
        self, assignment: Assignment, body: bytes, request_id: str, liveness: AskLiveness
    ) -> AsyncIterator[FrameStream]:
        """Send an encoded `GenerateRequest`; the engine has accepted it once the block is entered.

        Leaving the block before the last frame closes the connection, which aborts the request in the engine. Raises
        `UpstreamFailure`, or `PagemillError` for a request that no engine would take.
        """
        origin, connection = await self._ask(assignment, body, request_id, liveness)
        try:
            await _check_accepted(connection)
            weights_digest = connection.header(WEIGHTS_HEADER.encode())[:MAX_DIGEST_CHARS]
            stream = FrameStream(connection, weights_digest, self._silence_timeout_s, liveness)
            try:
                yield stream
            finally:
                stream.close()
        finally:
            # Keeps the connection only when the answer was read to its end.
            self._pool.give_back(origin, connection)

    async def raise_allowance(self, choice: Assignment, request_id: str, tokens: int) -> bool:
        """Let the engine generate more for a request that it has; whether it has understood."""
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
                    self._pool.give_back(origin, connection)
        except (CannotConnect, OSError, ValueError):  # a time-out is an OSError too
            return False

    async def _ask(
        self, assignment: Assignment, body: bytes, request_id: str, liveness: AskLiveness
    ) -> tuple[Origin, EngineConnection]:
        """A connection on which the engine has begun to answer."""
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
        except CannotConnect as error:
            raise UpstreamFailure("unreachable" if error.refused else "stalled", str(error)) from error
        except TimeoutError as error:
            raise UpstreamFailure("stalled", SILENT) from error
        except (OSError, ValueError) as error:
            raise UpstreamFailure("lost", BROKE) from error

    @asynccontextmanager
    async def _watched(self, limit: asyncio.Timeout, liveness: AskLiveness) -> AsyncIterator[None]:
        """End the wait for an engine's response early when its state stream is silent too."""
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


def _head(origin: Origin, token: str, request_id: str, num_bytes: int, path: str = "/internal/generate") -> bytes:
    """Raises `ValueError` for values that are invalid in a header."""
    if not (token + request_id).isprintable():
        raise ValueError("a token or a request id that is no line of text")
    return (
        f"POST {path} HTTP/1.1\r\n"
        f"Host: {origin.host_header}\r\n"
        f"Authorization: Bearer {token}\r\n"
        f"Content-Type: {MSGPACK_CONTENT_TYPE}\r\n"
        f"{PROTOCOL_HEADER}: {PROTOCOL_VERSION}\r\n"
        f"Content-Length: {num_bytes}\r\n"
        f"X-Request-Id: {request_id}\r\n\r\n"
    ).encode()


async def _check_accepted(connection: EngineConnection) -> None:
    status = connection.status
    if status == 200:
        content_type = connection.header(b"content-type").partition(";")[0].strip().lower()
        if content_type != FRAMES_CONTENT_TYPE:
            raise UpstreamFailure("broken", f"The engine answered {content_type[:80]!r} instead of frames.")
        return
    error = await _error_of(connection)
    if status == 503 and error.code in DECLINES:
        raise UpstreamFailure("declined", error.message, error.retry_after_s)
    if status in REFUSALS:
        raise UpstreamFailure("refused", error.message, error.retry_after_s)
    if status in CLIENT_FAULTS:
        raise error
    raise UpstreamFailure("broken", f"The engine answered {status}: {error.message}")


class _ErrorFields(msgspec.Struct):
    message: str = ""
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


async def _error_of(connection: EngineConnection) -> PagemillError:
    try:
        async with asyncio.timeout(ERROR_BODY_TIMEOUT_S):
            raw = await _bounded_body(connection)
    except OSError:  # a time-out is one too
        raw = b""
    error = parse_error(raw, connection.status, "The engine refused the request.")
    error.retry_after_s = _retry_after_s(connection.header(b"retry-after") or None)
    return error


async def _bounded_body(connection: EngineConnection) -> bytes:
    """Empty when it is too long."""
    body = b""
    while data := await connection.receive():
        body += data
        if len(body) > MAX_ERROR_BYTES:
            return b""
    return body


def parse_error(raw: bytes, status: int, otherwise: str) -> PagemillError:
    """An engine's error body as an error; a body in any other shape gives one with the message `otherwise`."""
    try:
        fields = msgspec.json.decode(raw, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = _ErrorFields()
    return PagemillError(
        fields.message[:2000] or otherwise, status=status, type=fields.type, param=fields.param, code=fields.code
    )


def _retry_after_s(value: str | None) -> float | None:
    try:
        return min(120.0, max(0.0, float(value))) if value is not None else None
    except ValueError:
        return None
