"""An `AnswerStream` over any source of bytes, for tests that simulate the network between relay and engines."""

from __future__ import annotations

import asyncio
from typing import Protocol

from pagemill_gateway.relay.answer_stream import SILENCE_CHECKS, AskLiveness, Frame, Take, check_order
from pagemill_gateway.repeated_timeout import RepeatedTimeout
from pagemill_protocol.frames import FrameDecoder, FrameError
from pagemill_routing.attempts.attempt_failures import BROKE, SILENT, TOO_SHORT, UpstreamFailure, garbage


class Body(Protocol):
    async def receive(self) -> bytes:
        """Return the next bytes; none at the end. Raises `OSError` if the connection breaks."""
        ...


class FrameStream:
    def __init__(self, body: Body, weights_digest: str, silence_timeout_s: float, liveness: AskLiveness) -> None:
        self.weights_digest = weights_digest
        self.waited_s = 0.0
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._liveness = liveness
        self._timeout = RepeatedTimeout(silence_timeout_s / SILENCE_CHECKS)
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

    def raise_allowance(self, tokens: int) -> bool:
        return False

    def close(self) -> None:
        self._timeout.close()

    async def _receive(self) -> bytes:
        started, num_silent = self._loop.time(), 0
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
