"""The frames of one engine's answer, however they come: what the relay reads, and the answer over HTTP.

An answer over a link is `engine_link`'s. Both pass on complete frames of a well-formed answer, or an `UpstreamFailure`.
Frames that come while a reader waits are offered to `take` first, so that a plain stream wakes its task for the first
and the last of them only.
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
from pagemill_protocol.generate import FrameMeta

END_OF_BODY_TIMEOUT_S = 0.5
SILENCE_CHECKS = 4
"""In one silence timeout, and as many in a row must find the engine silent: a time in which this process itself did not
run counts as one."""

Frame = tuple[FrameMeta, bytes]
Take = Callable[[list[Frame]], bool]
"""Passes frames on at once, or refuses them: then the reader gets them. What it raises, the reader gets too."""
AskLiveness = Callable[[], Awaitable[Liveness]]
"""What is known of the engine, which sends nothing here."""


class AnswerStream(Protocol):
    """The frames of one answer in the groups in which the network brought them."""

    weights_digest: str
    """Of the weights that make the answer; empty: the engine does not report it."""
    waited_s: float
    """In `read`, for the engine."""

    async def read(self, take: Take | None = None) -> list[Frame]:
        """The next frames that `take` does not take, at least one; an empty list after the last. Raises
        `UpstreamFailure`, `PagemillError` for a request that no engine would take, and what `take` raises."""
        ...

    async def finish(self) -> None:
        """After the last frame: let the connection be used again."""
        ...

    def close(self) -> None:
        """Nothing more is read. Before the last frame this aborts the request in the engine."""
        ...


def check_order(frames: list[Frame], is_complete: bool) -> bool:
    """Whether the last frame is among them. Raises `FrameError` where one follows it."""
    for meta, _ in frames:
        if is_complete:
            raise FrameError("a frame follows the last one")
        is_complete = meta.last
    return is_complete


class Body(Protocol):
    """The body of an answer, as `EngineConnection` gives it."""

    async def receive(self) -> bytes:
        """The next bytes; none after the last. Raises `OSError` when the connection breaks."""
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
        self._decoder = FrameDecoder()
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
