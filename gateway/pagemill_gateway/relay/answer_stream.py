"""The stream of an engine's answer as the relay reads it, and its implementation over HTTP.

`engine_link` has the implementation over a link. Both return complete frames of a valid answer, or raise
`UpstreamFailure`. Frames that arrive while a reader waits are passed to its `take` first, so that a plain stream wakes
its task only for the first and the last frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from pagemill_gateway.brain.interface import Liveness
from pagemill_gateway.relay.attempt_failures import BROKE, SILENT, TOO_SHORT, UpstreamFailure, garbage
from pagemill_gateway.repeated_timeout import RepeatedTimeout
from pagemill_protocol.frames import FrameDecoder, FrameError
from pagemill_protocol.request.generate import FrameMeta

END_OF_BODY_TIMEOUT_S = 0.5
SILENCE_CHECKS = 4
"""The number of checks per silence timeout, of which all must find the engine silent. A pause of this process itself
counts as one check."""

Frame = tuple[FrameMeta, bytes]
Take = Callable[[list[Frame]], bool]
"""Forwards frames at once and returns true, or returns false, so that the reader gets them. The reader also gets its
exceptions."""
AskLiveness = Callable[[], Awaitable[Liveness]]
"""Returns the liveness of an engine that is silent in an answer."""


class AnswerStream(Protocol):
    """The frames of one answer, in groups as the network delivers them."""

    weights_digest: str
    """The digest of the engine's weights; empty if the engine does not report it."""
    waited_s: float
    """The time that `read` has waited for the engine."""

    async def read(self, take: Take | None = None) -> list[Frame]:
        """Return the next frames that `take` refuses, at least one, or an empty list after the last one.

        Raises `UpstreamFailure`, `PagemillError` for a request that no engine would accept, and what `take` raises.
        """
        ...

    async def finish(self) -> None:
        """Make the connection reusable, after the last frame."""
        ...

    def close(self) -> None:
        """End reading. Before the last frame, this aborts the request in the engine."""
        ...


def check_order(frames: list[Frame], is_complete: bool) -> bool:
    """Return whether the answer is complete after these frames. Raises `FrameError` if one follows the last frame."""
    for meta, _ in frames:
        if is_complete:
            raise FrameError("a frame follows the last one")
        is_complete = meta.last
    return is_complete


class Body(Protocol):
    """The body of a response, such as an `EngineConnection`."""

    async def receive(self) -> bytes:
        """Return the next bytes; none at the end. Raises `OSError` if the connection breaks."""
        ...


def _nothing() -> None: ...


class FrameStream:
    """An `AnswerStream` over HTTP."""

    def __init__(
        self,
        body: Body,
        weights_digest: str,
        silence_timeout_s: float,
        liveness: AskLiveness,
        on_close: Callable[[], None] = _nothing,
    ) -> None:
        self.weights_digest = weights_digest
        self.waited_s = 0.0
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._liveness = liveness
        self._timeout = RepeatedTimeout(silence_timeout_s / SILENCE_CHECKS)
        self._on_close = on_close
        self._decoder = FrameDecoder(splits=True)
        self._complete = False

    async def read(self, take: Take | None = None) -> list[Frame]:
        try:
            while data := await self._receive():
                frames = self._decoder.feed(data)
                self._complete = check_order(frames, self._complete)
                if frames and not (take is not None and take(frames)):
                    return frames
            self._decoder.close()
        except FrameError as error:
            raise garbage(error) from error
        except TimeoutError as error:
            raise UpstreamFailure("stalled", SILENT) from error
        except OSError as error:
            raise UpstreamFailure("lost", BROKE) from error
        if not self._complete:
            raise UpstreamFailure("lost", TOO_SHORT)
        return []

    def close(self) -> None:
        self._timeout.close()
        self._on_close()

    async def finish(self) -> None:
        with suppress(OSError):  # including timeouts
            async with asyncio.timeout(END_OF_BODY_TIMEOUT_S):
                await self._body.receive()

    async def _receive(self) -> bytes:
        """Return the next bytes. Raises `TimeoutError` if the engine is stuck, or silent in both streams."""
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
