"""One WebSocket connection: messages of bytes over a connection that HTTP has given away (`pagemill_servers.direct`).

`websockets` reads and writes the frames (RFC 6455). This module bounds what a client can make the gateway hold or
compute: the size of a message and the time in which it arrives, frames of a few bytes, messages while another is being
answered, and answers that are not read. `responses` decides what messages mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, cast

from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import Protocol, Side, State

from pagemill_gateway.limits.in_flight_limit import InFlightSlot
from pagemill_protocol.errors import PagemillError, request_timeout
from pagemill_servers.connection_limits import Place
from pagemill_servers.direct import UpgradedProtocol

logger = logging.getLogger("pagemill.gateway.websocket")

READ_BYTES = 4096
"""Bytes that are parsed at once: of the smallest frames some milliseconds."""
FREE_BYTES = 8 * 1024
"""Bytes of an unfinished message that do not count, as those of a request's head."""
FREE_FRAMES, FRAME_BYTES = 64, 64
"""Frames of each `PING_S` beyond the first have to be at least so long on average."""
MAX_REFUSED = 8
"""Messages that are refused while one is being answered; a client that sends more is disconnected."""
PING_S = 30.0
"""Interval of pings, of which one may remain unanswered."""
CLOSE_TIMEOUT_S = 2.0

Refusal = Callable[[PagemillError], bytes]
"""Renders the message that refuses another one."""


class MessageBounds(NamedTuple):
    max_message_bytes: int
    message_timeout_s: float
    """How long a message may take to arrive."""
    idle_timeout_s: float


class Disconnected(Exception):
    """The client is gone, or the connection is being closed."""


class WebSocketConnection(UpgradedProtocol):
    def __init__(
        self,
        serve: Callable[[WebSocketConnection], Coroutine[Any, Any, None]],
        refusal: Refusal,
        bounds: MessageBounds,
        memory: Callable[[], InFlightSlot],
        place: Place | None,
    ) -> None:
        """`serve` answers the messages. `memory` returns a slot for a message that has arrived in part. `place`: that
        of the connection."""
        self._serve = serve
        self._refusal = refusal
        self._bounds = bounds
        self._memory = memory
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._protocol = Protocol(Side.SERVER, max_size=bounds.max_message_bytes, logger=_QUIET)
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None]
        self._parts = bytearray()
        """The unfinished message."""
        self._slot: InFlightSlot | None = None
        """Counts the unfinished message, if it is large."""
        self._message_timer: asyncio.TimerHandle | None = None
        self._message: asyncio.Future[bytes] | None = None
        """What waits for a message; None while one is being answered."""
        self._next: bytes | None = None
        """The message that waits for the end of the response."""
        self._num_refused = 0
        self._num_frames = self._num_frame_bytes = 0
        """Since the last ping."""
        self._pings_unanswered = 0
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._is_ending = False
        self.on_disconnect: Callable[[], None] = _nothing
        """Called when the client disconnects."""

    # Calls of what answers the messages.

    async def next_message(self) -> bytes:
        """Return the next message. Raises `Disconnected`; closes an idle connection."""
        if self._is_ending:
            self.close(CloseCode.GOING_AWAY, "The gateway is shutting down.")
        self._check_open()
        self._num_refused = 0
        if self._next is not None:
            message, self._next = self._next, None
            self._count()
            return message
        self._message = self._loop.create_future()
        if self._place is not None:
            self._place.become_idle()
        try:
            async with asyncio.timeout(self._bounds.idle_timeout_s):
                return await self._message
        except TimeoutError:
            self.close(CloseCode.NORMAL_CLOSURE, "No message has arrived for a long time.")
            raise Disconnected from None
        finally:
            self._message = None
            if self._place is not None:
                self._place.become_busy()

    async def send(self, data: bytes, *, is_first: bool = True, is_last: bool = True) -> None:
        """Send a message, or a part of one, when the client has read those before. Raises `Disconnected`."""
        await self._can_write.wait()
        self._check_open()
        if is_first:
            self._protocol.send_text(data, is_last)
        else:
            self._protocol.send_continuation(data, is_last)
        self._flush()

    @property
    def is_slow(self) -> bool:
        """Whether the client has not read what was sent, so that the next message waits."""
        return not self._can_write.is_set()

    def ping(self) -> None:
        if self._protocol.state is State.OPEN and self._can_write.is_set():
            self._protocol.send_ping(b"")
            self._flush()

    def close(self, code: CloseCode, reason: str) -> None:
        """Begin to close; what was sent reaches the client before."""
        if self._protocol.state is not State.OPEN:
            return
        self._protocol.send_close(code, reason)
        self._flush()
        self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self) -> None:
        self._transport.abort()

    # Calls of the server and the transport.

    def shutdown(self) -> None:
        self._is_ending = True
        if self._message is not None:
            self.close(CloseCode.GOING_AWAY, "The gateway is shutting down.")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._task = self._loop.create_task(self._run())
        self._ping_timer = self._loop.call_later(PING_S, self._tick)

    def data_received(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(data), READ_BYTES):
            if self._protocol.state is State.CLOSED or self._transport.is_closing():
                return
            self._protocol.receive_data(bytes(view[start : start + READ_BYTES]))
            self._num_frame_bytes += min(READ_BYTES, len(data) - start)
            for event in self._protocol.events_received():
                if isinstance(event, Frame):
                    self._take(event)
            self._flush()
            if self._num_frames > FREE_FRAMES + self._num_frame_bytes // FRAME_BYTES:
                self.close(CloseCode.POLICY_VIOLATION, "Send larger frames.")
                self._transport.pause_reading()
                return
        self._count()

    def eof_received(self) -> None:
        self._transport.abort()

    def pause_writing(self) -> None:
        self._can_write.clear()
        self._transport.pause_reading()  # nothing more is read from a client that reads nothing

    def resume_writing(self) -> None:
        self._can_write.set()
        self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._protocol.receive_eof()
        self._protocol.state = State.CLOSED
        self._ping_timer.cancel()
        self._stop_message_timer()
        self._parts.clear()
        self._next = None
        self._release()
        self._can_write.set()
        if self._message is not None and not self._message.done():
            self._message.set_exception(Disconnected())
        self.on_disconnect()
        self.on_lost()

    # Inside.

    async def _run(self) -> None:
        try:
            await self._serve(self)
        except (Disconnected, InvalidState):
            pass
        except Exception:
            logger.exception("a WebSocket connection failed")
            self.close(CloseCode.INTERNAL_ERROR, "The gateway failed.")

    def _check_open(self) -> None:
        if self._protocol.state is not State.OPEN:
            raise Disconnected

    def _take(self, frame: Frame) -> None:
        self._num_frames += 1
        if frame.opcode is Opcode.PONG:
            self._pings_unanswered = 0
        elif frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._parts += frame.data
            if frame.fin:
                message = bytes(self._parts)
                self._parts = bytearray()
                self._deliver(message)

    def _deliver(self, message: bytes) -> None:
        if self._protocol.state is not State.OPEN:
            return
        if self._message is not None and not self._message.done():
            self._message.set_result(message)
        elif self._next is None:
            self._next = message
        else:
            self._num_refused += 1
            self._refuse(busy())
            if self._num_refused > MAX_REFUSED:
                self.close(CloseCode.POLICY_VIOLATION, "Wait for the end of a response before the next message.")

    def _count(self) -> None:
        """Count what has arrived and was not taken yet. What there is no memory for ends the connection."""
        unfinished = len(self._parts) + len(self._protocol.reader.buffer)
        if not unfinished:
            self._stop_message_timer()
        elif self._message_timer is None:
            self._message_timer = self._loop.call_later(self._bounds.message_timeout_s, self._on_message_timeout)
        held = unfinished + len(self._next or b"")
        if held <= FREE_BYTES or self._protocol.state is not State.OPEN:
            self._release()
            return
        try:
            if self._slot is None:
                self._slot = self._memory()
            self._slot.resize(held)
        except PagemillError as error:
            self._refuse(error)
            self.close(CloseCode.TRY_AGAIN_LATER, "There is no memory for the message.")
            self._release()

    def _release(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.leave()

    def _stop_message_timer(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _on_message_timeout(self) -> None:
        self._message_timer = None
        self._refuse(request_timeout())
        self.close(CloseCode.POLICY_VIOLATION, "The message took too long to arrive.")

    def _refuse(self, error: PagemillError) -> None:
        """Send a message beside those that answer, unless one of them has been sent in part."""
        if self._protocol.state is State.OPEN and not self._protocol.expect_continuation_frame:
            self._protocol.send_text(self._refusal(error))
            self._flush()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
            else:  # both sides have said that they close
                self._transport.close()

    def _tick(self) -> None:
        self._num_frames = self._num_frame_bytes = 0
        if self._pings_unanswered > 1:
            self._transport.abort()
            return
        if self._can_write.is_set():  # a client that does not read is bounded by the timeout of its answer
            self._pings_unanswered += 1
            self.ping()
        self._ping_timer = self._loop.call_later(PING_S, self._tick)


def busy() -> PagemillError:
    return PagemillError(
        "A response is being generated on this connection, and another message waits. Wait for the end of the "
        "response, or open another connection.",
        status=409,
        code="response_already_in_flight",
    )


def _nothing() -> None:
    pass


_QUIET = logging.getLogger("pagemill.gateway.websocket.frames")
_QUIET.setLevel(logging.WARNING)
