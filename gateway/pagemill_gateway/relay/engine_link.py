"""The gateway's end of one link: sends requests, and passes the frames of all answers to their streams.

One read of the socket has the output of an engine step for many requests. Each stream gets its part by a call and
forwards it to its client in the same iteration of the event loop (`answer_stream.Take`). Frames need no tasks, timers
or queues; one timer checks all streams for silence. `links` assigns links to requests, and `relay` interprets answers.
The protocol is `pagemill_protocol.link`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from pagemill_gateway.relay.answer_stream import SILENCE_CHECKS, AskLiveness, Frame, Take, check_order
from pagemill_protocol.frames import FrameDecoder, FrameError
from pagemill_protocol.link import (
    CREDIT_BYTES,
    PIECE_BYTES,
    Record,
    RecordDecoder,
    RecordKind,
    Refusal,
    encode_number,
    encode_pieces,
    encode_record,
)
from pagemill_routing.attempts.attempt_failures import (
    BROKE,
    MAX_ERROR_BYTES,
    SILENT,
    TOO_SHORT,
    UpstreamFailure,
    garbage,
    refusal,
)

MAX_DIGEST_CHARS = 256
LEAST_TICK_S = 0.01
RECORDS_PER_ITERATION = 8
"""The records of the backlog that are processed per iteration of the event loop: about 0.3 ms."""
MAX_STREAMS = 2**32 - 1
"""The number of streams after which a link is replaced."""
_refusal_decoder = msgspec.msgpack.Decoder(Refusal)
_DATA = int(RecordKind.DATA)


class LinkTimeouts:
    """The timeouts for silent engines."""

    def __init__(self, accept_timeout_s: float, silence_timeout_s: float) -> None:
        self.accept_s = accept_timeout_s
        self.silence_s = silence_timeout_s
        self.check_s = silence_timeout_s / SILENCE_CHECKS


class Backlog:
    """The records of streams that have begun, of all links, which are processed after new requests and first frames.

    They are processed in order, a few in each iteration of the event loop, so that a client's first token does not wait
    for other clients' next tokens.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.records: deque[tuple[LinkStream, Record, float]] = deque()
        """The records with their streams and arrival times. After appending, schedule `process_some` unless
        `is_due`."""
        self.is_due = False

    def process_some(self) -> None:
        records = self.records
        try:
            for _ in range(RECORDS_PER_ITERATION):
                if not records:  # a broken link may have processed all of them
                    break
                stream, record, now = records.popleft()
                if record[0] == _DATA:
                    stream.received(record[2], now)
                else:
                    stream.link.deliver(stream, record, now)
        finally:
            self.is_due = bool(records)
            if records:
                self._loop.call_soon(self.process_some)

    def process_all(self) -> None:
        """Process all records at once."""
        while self.records:
            stream, record, now = self.records.popleft()
            stream.link.deliver(stream, record, now)


class LinkStream:
    """An `AnswerStream` over a link."""

    def __init__(
        self,
        link: EngineLink,
        number: int,
        liveness: AskLiveness,
        on_accepted: Callable[[], None],
        on_freed: Callable[[], None],
        now: float,
    ) -> None:
        self.weights_digest = ""
        self.waited_s = 0.0
        self.has_begun = False
        """Whether its first frame has arrived."""
        self.link = link
        self._number = number
        self._liveness = liveness
        self._on_accepted = on_accepted
        self._on_freed = on_freed
        self._decoder = FrameDecoder(splits=True)
        self._frames: list[Frame] = []
        """The frames that `take` refused and that are not read yet."""
        self._num_held = 0
        """The received bytes that are not forwarded yet."""
        self._num_owed = 0
        """The forwarded bytes that are not credited to the engine yet."""
        self._take: Take | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._waiting_since = self._received_at = self._checked_at = self._opened_at = now
        self._is_accepted = self._is_complete = self._is_over = False
        self._error: BaseException | None = None
        self._num_silent = 0
        self._asking: asyncio.Task[None] | None = None

    async def read(self, take: Take | None = None) -> list[Frame]:
        link = self.link
        if not self._frames and not self._is_over:
            self._credit()
            self._take, self._waiting_since = take, link.now()
            self._waiting = link.new_future()
            try:
                await self._waiting
            finally:
                self._take = self._waiting = None
                self.waited_s += link.now() - self._waiting_since
        if self._frames:
            frames, self._frames = self._frames, []
            self._credit()
            return frames
        if self._error is not None:
            raise self._error
        if not self._is_complete:
            raise UpstreamFailure("lost", TOO_SHORT)
        return []

    def raise_allowance(self, tokens: int) -> bool:
        return not self._is_over and self.link.send_number(RecordKind.ALLOWANCE, self._number, tokens)

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self._is_over = True
        self.link.forget(self._number, cancel=not self._is_complete)

    # Calls of the link.

    def accepted(self, weights_digest: str) -> None:
        self.weights_digest = weights_digest
        self._is_accepted = True
        self._on_accepted()

    def freed(self) -> None:
        if not self._is_over:
            self._on_freed()

    def received(self, data: bytes, now: float) -> None:
        self._received_at, self._num_silent = now, 0
        if self._is_over:
            return
        try:
            frames = self._decoder.feed(data)
            if self._is_complete or len(frames) != 1:
                self._is_complete = check_order(frames, self._is_complete)
            else:
                self._is_complete = frames[0][0].last
        except FrameError as error:
            self.fail(garbage(error))
            return
        self._num_held += len(data)
        if not frames:
            if self._num_held >= CREDIT_BYTES and self._waiting is not None and not self._frames:
                self._credit()  # let the engine send the rest of a large frame
            return
        self.has_begun = True
        take = self._take
        if take is None or self._frames:
            self._leave(frames)
            return
        try:
            if not take(frames):
                self._leave(frames)
            elif self._num_held >= CREDIT_BYTES:
                self._credit()
        except Exception as error:  # raised to the reader
            self._error, self._is_over = error, True
            self._wake()

    def ended(self) -> None:
        try:
            self._decoder.close()
        except FrameError as error:
            self.fail(garbage(error))
            return
        self._is_over = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Fail the stream. Received frames can still be read, and a complete answer stays complete."""
        if not self._is_over and not self._is_complete:
            self._error = error
        self._is_over = True
        self._wake()

    def check(self, now: float, timeouts: LinkTimeouts) -> float:
        """Check the engine's liveness if it has been silent for long; return the time of the next check.

        While the reader waits for its client, the engine is not checked.
        """
        if self._waiting is None or self._waiting.done() or self._asking is not None:
            return now + timeouts.check_s
        due_at = max(self._received_at, self._checked_at, self._waiting_since) + timeouts.check_s
        if not self._is_accepted:
            refused_at = self._opened_at + timeouts.accept_s
            if now >= refused_at:
                self._fail_as_silent()
                return math.inf
            due_at = min(refused_at, max(due_at, self._opened_at + timeouts.silence_s))
        if now < due_at:
            return due_at
        self._asking = asyncio.create_task(self._ask(now))
        return now + timeouts.check_s

    async def _ask(self, asked_at: float) -> None:
        liveness = await self._liveness()
        self._asking, self._checked_at = None, asked_at
        if self._received_at > asked_at or self._waiting is None:
            return
        self._num_silent = self._num_silent + 1 if liveness == "silent" else 0
        if not self._is_accepted:
            if liveness != "working":
                self._fail_as_silent()
        elif liveness == "stuck" or self._num_silent >= SILENCE_CHECKS:
            self._fail_as_silent()

    def _fail_as_silent(self) -> None:
        self.link.retire()
        self.link.forget(self._number, cancel=True)
        self.fail(UpstreamFailure("stalled", SILENT))

    def _leave(self, frames: list[Frame]) -> None:
        """Leave frames to the reader."""
        self._frames += frames
        self._wake()

    def _credit(self) -> None:
        """Count the held bytes as forwarded, and credit them to the engine if they are enough."""
        self._num_owed += self._num_held
        self._num_held = 0
        if self._num_owed >= CREDIT_BYTES:
            self.link.send_number(RecordKind.CREDIT, self._number, self._num_owed)
            self._num_owed = 0

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class EngineLink(asyncio.Protocol):
    """A link. Create it inside a running event loop, and give it a connection; then `send` concurrent requests."""

    def __init__(self, timeouts: LinkTimeouts, idle_s: float, backlog: Backlog) -> None:
        """`idle_s`: the time after which a link without requests is closed. All links share the `backlog`."""
        self._backlog = backlog
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.new_future: Callable[[], asyncio.Future[None]] = self._loop.create_future
        self._timeouts = timeouts
        self._idle_s = idle_s
        self._transport: asyncio.Transport
        self._streams: dict[int, LinkStream] = {}
        self._num_opened = 0
        self._decoder = RecordDecoder()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_lost = self._is_retired = False
        self._idle_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    @property
    def is_usable(self) -> bool:
        return not (self._is_lost or self._is_retired or self._transport.is_closing())

    async def send(
        self,
        body: bytes,
        request_id: str,
        liveness: AskLiveness,
        on_accepted: Callable[[], None],
        on_freed: Callable[[], None],
    ) -> LinkStream:
        """Send an encoded `GenerateRequest`, and return the stream of its answer, which the caller must close.

        `on_freed` is called when the engine has computed a request whose answer is not complete here. `request_id` is
        the client request's id, for the engine's log.
        """
        if not self.is_usable:
            raise UpstreamFailure("lost", BROKE)
        self._num_opened += 1
        number = self._num_opened
        if number >= MAX_STREAMS:
            self.retire()
        now = self.now()
        stream = self._streams[number] = LinkStream(self, number, liveness, on_accepted, on_freed, now)
        self._schedule_check(now + min(self._timeouts.check_s, self._timeouts.accept_s))
        named = encode_record(RecordKind.REQUEST_ID, number, request_id.encode())
        if len(body) <= PIECE_BYTES:
            self._transport.write(named + encode_record(RecordKind.REQUEST, number, body))
            return stream
        try:
            await self._send_in_pieces(number, body, named)
        except BaseException:
            stream.close()
            raise
        return stream

    def forget(self, number: int, *, cancel: bool) -> None:
        """Forget a stream. `cancel`: let the engine abort its request."""
        if self._streams.pop(number, None) is None or self._is_lost:
            return
        if cancel:
            self._transport.write(encode_record(RecordKind.CANCEL, number))
        if not self._streams:
            self._idle_since = self.now()
            if self._is_retired:
                self._transport.close()

    def send_number(self, kind: RecordKind, stream: int, number: int) -> bool:
        """Send credited bytes or an allowance. Return false if the stream is not open any more."""
        if stream not in self._streams or self._is_lost:
            return False
        self._transport.write(encode_number(kind, stream, number))
        return True

    def retire(self) -> None:
        """Accept no further requests, and close the link with its last stream."""
        self._is_retired = True

    def abort(self) -> None:
        self._transport.abort()

    async def _send_in_pieces(self, number: int, body: bytes, named: bytes) -> None:
        """Send a large request in pieces, so that it is not copied at once and does not delay others."""
        for piece in encode_pieces(RecordKind.REQUEST_PART, number, body):
            await self._may_write.wait()
            if number not in self._streams or self._is_lost:
                return
            self._transport.write(piece)
            await asyncio.sleep(0)
        self._transport.write(named + encode_record(RecordKind.REQUEST, number))

    def _check_streams(self) -> None:
        """Check for silent streams, and close an idle link."""
        self._timer = None
        now = self.now()
        next_at = min([stream.check(now, self._timeouts) for stream in list(self._streams.values())], default=math.inf)
        if self._streams:
            self._schedule_check(max(next_at, now + LEAST_TICK_S))
        elif now - self._idle_since >= self._idle_s:
            self._transport.close()
        else:
            self._schedule_check(self._idle_since + self._idle_s)

    def _schedule_check(self, when: float) -> None:
        if self._timer is not None:
            if self._timer_at <= when:
                return  # the earlier check sets the next timer
            self._timer.cancel()
        # uvloop's handle of a time that is over has no `when()`.
        self._timer, self._timer_at = self._loop.call_at(when, self._check_streams), when

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin on a connection that the engine has switched to the link's protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._idle_since = self.now()
        self._check_streams()

    def data_received(self, data: bytes) -> None:
        try:
            records = self._decoder.feed(data)
        except FrameError as error:
            self._fail_connection(error)
            return
        now, streams, backlog = self.now(), self._streams, self._backlog
        later = backlog.records
        for record in records:
            stream = streams.get(record[1])
            if stream is None:
                continue  # the stream was closed
            if stream.has_begun:
                later.append((stream, record, now))
            else:
                self.deliver(stream, record, now)
        if later and not backlog.is_due:
            backlog.is_due = True
            self._loop.call_soon(backlog.process_some)

    def deliver(self, stream: LinkStream, record: Record, now: float) -> None:
        """Pass a record to its stream. `now` is its arrival time."""
        if self._streams.get(record[1]) is not stream:
            return  # the stream was closed
        try:
            if record[0] == _DATA:
                stream.received(record[2], now)
            else:
                self._dispatch(stream, record)
        except (FrameError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail_connection(error)

    def _fail_connection(self, error: Exception) -> None:
        self._fail_all(garbage(error))
        self._transport.abort()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._may_write.set()
        self._fail_all(UpstreamFailure("lost", BROKE))

    def _fail_all(self, error: UpstreamFailure) -> None:
        self._backlog.process_all()  # received records can still be read
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.fail(error)

    def _dispatch(self, stream: LinkStream, record: Record) -> None:
        """Process a record of another kind than data."""
        kind, number, data = record
        if kind == RecordKind.END:
            del self._streams[number]
            stream.ended()
        elif kind == RecordKind.ACCEPTED:
            stream.accepted(data.decode()[:MAX_DIGEST_CHARS])
        elif kind == RecordKind.FREED:
            stream.freed()
        elif kind == RecordKind.REFUSED:
            refused = _refusal_decoder.decode(data)
            del self._streams[number]
            stream.fail(refusal(refused.status, refused.body[:MAX_ERROR_BYTES], refused.retry_after))
        else:
            raise FrameError(f"A record has the kind {kind}, which no engine sends.")
