"""Keeps the allowance of one answer (`limits.allowance`) ahead of its tokens: reserves more, and informs the engine.

If the limit is used up, the engine ends the answer with the finish reason `length`. Until then the reservation is
retried, because other requests may free tokens.
"""

from __future__ import annotations

import asyncio
import logging

from pagemill_gateway.limits.allowance import Allowance
from pagemill_gateway.relay.answer_stream import AnswerStream
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import FrameMeta

RETRY_S = 0.25
logger = logging.getLogger("pagemill.gateway.relay")


class Growth:
    """The growth of one engine request's allowance. Create it inside a running event loop; `close` it at the end."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._stream: AnswerStream | None = None
        """The answer of the current attempt, once its request was sent."""
        self._sent = 0
        """The allowance that the current engine knows."""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> int:
        """Begin an attempt. Return the allowance to send with it."""
        self._stream, self._sent = None, self._allowance.begin()
        return self._sent

    def opened(self, stream: AnswerStream) -> None:
        """Note that the request of the attempt was sent."""
        self._stream = stream

    def begin_anew(self) -> None:
        self._allowance.begin_anew()

    def count(self, meta: FrameMeta) -> None:
        """Count the tokens of a frame, and reserve more if few are left."""
        if not self._allowance.count(meta) or meta.last:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._grow())

    async def close(self) -> None:
        self._stream = None  # it refers to the request, and so to this object
        if self._task is not None:
            self._task.cancel()
            (end,) = await asyncio.gather(self._task, return_exceptions=True)
            if isinstance(end, Exception):
                logger.error("the allowance of an answer could not grow", exc_info=end)

    async def _grow(self) -> None:
        while self._allowance.low or self._sent < self._allowance.tokens:
            if self._allowance.low:
                await self._reserve()
            if self._sent == self._allowance.tokens or not self._send_allowance():
                await asyncio.sleep(RETRY_S)

    async def _reserve(self) -> None:
        try:
            await self._allowance.grow()
        except PagemillError as error:
            logger.debug("an answer's allowance cannot grow now: %s", error.message)

    def _send_allowance(self) -> bool:
        """Send the allowance to the engine. Return whether it was sent."""
        tokens = self._allowance.tokens
        if self._stream is None or not self._stream.raise_allowance(tokens):
            return False
        self._sent = max(self._sent, tokens)
        return True
