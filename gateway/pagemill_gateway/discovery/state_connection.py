"""The connection of one state stream. Most frames are applied in the callback that receives them.

Engines send a frame with every change, so a gateway reads thousands a second. Only frames that `apply` refuses, and
frames that arrive before those are handled, wake the task in `left_frame`. `state_streams` interprets frames and
reopens streams.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pagemill_gateway.engine_http.engine_connection import MAX_UNREAD_BYTES, EngineConnection
from pagemill_protocol.frames import StateDecoder
from pagemill_protocol.report.state import StateFrame

_OK = 200


class StateConnection(EngineConnection):
    """A state stream: call `ask` first, then `left_frame` until it returns None."""

    def __init__(self, apply: Callable[[StateFrame], bool]) -> None:
        """`apply` returns whether it has handled the frame; an exception ends the stream."""
        super().__init__()
        self._apply = apply
        self._decoder = StateDecoder()
        self._left: deque[StateFrame] = deque()
        self._num_left_bytes = 0
        self._news: asyncio.Future[None] | None = None
        self._received_at = self._loop.time()
        self._fault: Exception | None = None

    async def left_frame(self, idle_timeout_s: float) -> StateFrame | None:
        """Return the next frame that `apply` has not handled; `None` at the end of the stream.

        Raises `TimeoutError` if nothing arrives for `idle_timeout_s`, `FrameError`, `ConnectionBroken`, and what
        `apply` raised.
        """
        while not self._left:
            if not self._reads and not self._transport.is_closing():
                self._reads, self._num_left_bytes = True, 0
                self._transport.resume_reading()
            if (fault := self._fault or self._error) is not None:
                raise fault
            if self.has_ended:
                self._decoder.close()
                return None
            await self._wait_for_news(idle_timeout_s)
        return self._left.popleft()

    async def _wait_for_news(self, idle_timeout_s: float) -> None:
        self._news = news = self._loop.create_future()
        timer = self._loop.call_at(self._received_at + idle_timeout_s, self._notify)
        try:
            await news
        finally:
            timer.cancel()
            self._news = None
        if self._loop.time() >= self._received_at + idle_timeout_s:
            raise TimeoutError(f"no state frame within {idle_timeout_s:g} s")

    def _notify(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # Callbacks of parser and transport.

    def on_body(self, body: bytes) -> None:
        if self.status != _OK:
            super().on_body(body)
            return
        if self._fault is not None:
            return  # one read may bring more than the frame that ended the stream
        self._num_body_bytes += len(body)
        self._received_at = self._loop.time()
        try:
            for frame in self._decoder.feed(body):
                if self._left or self._news is None or self._news.done() or not self._apply(frame):
                    self._left.append(frame)
            if self._left:
                self._leave(len(body))
        except Exception as error:
            self._fault = error
            self._transport.abort()
            self._notify()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._notify()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._notify()

    def _leave(self, num_bytes: int) -> None:
        """Count received bytes with frames for the task; pause reading if there are too many."""
        self._num_left_bytes += num_bytes
        if self._num_left_bytes > MAX_UNREAD_BYTES and self._reads and not self._transport.is_closing():
            self._reads = False
            self._transport.pause_reading()
        self._notify()
