"""A connection between two processes: calls with replies in both directions, and notifications, as a stream of frames.

The messages of one iteration of the event loop are sent in one write. When the peer is gone, all open calls fail;
`control_process_client` and `worker_connection` handle that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

from pagemill_gateway.ipc.messages import Abandoned, Call, CallRefusal, Reply
from pagemill_protocol.errors import PagemillError, internal_error
from pagemill_protocol.frames import FrameError, MessageDecoder, encode_message

logger = logging.getLogger("pagemill.gateway.ipc")

MAX_MESSAGE_BYTES = 192 * 1024 * 1024
"""The largest tokenizer bundle, with a margin."""
WHAT = "process"
_encoder = msgspec.msgpack.Encoder()

Value = TypeVar("Value")
Incoming = TypeVar("Incoming")
QuestionHandler = Callable[[Any], Coroutine[Any, Any, object]]
"""Returns the answer to a call of the peer."""


class IpcConnectionLost(ConnectionError):
    """The peer is gone."""


class _PendingReply(NamedTuple):
    future: asyncio.Future[Any]
    decoder: msgspec.msgpack.Decoder[Any]
    undo: Callable[[Any], None] | None


class IpcConnection(asyncio.Protocol, Generic[Incoming]):
    """One end of the connection. `Incoming` is the type of the peer's messages."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Incoming],
        *,
        on_question: QuestionHandler,
        on_note: Callable[[Any], None],
        on_lost: Callable[[], None],
        on_made: Callable[[], None] = lambda: None,
    ) -> None:
        self._decoder = MessageDecoder(WHAT, decoder, MAX_MESSAGE_BYTES)
        self._on_question = on_question
        self._on_note = on_note
        self._on_lost = on_lost
        self._on_made = on_made
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outbox: list[bytes] = []
        self._waiting: dict[int, _PendingReply] = {}
        self._num_questions = 0
        self._answering: dict[int, asyncio.Task[None]] = {}
        self.lost = False
        self._gone: asyncio.Future[None] = self._loop.create_future()

    # Calls and notifications.

    async def ask(
        self, question: object, decoder: msgspec.msgpack.Decoder[Value], undo: Callable[[Value], None] | None = None
    ) -> Value:
        """Call the peer, and return its answer. Raises the peer's `PagemillError`, or `IpcConnectionLost`.

        `undo` is called with an answer that arrives after the caller was cancelled.
        """
        if self.lost:
            raise IpcConnectionLost
        self._num_questions = number = self._num_questions + 1
        future: asyncio.Future[Value] = self._loop.create_future()
        self._waiting[number] = _PendingReply(future, decoder, undo)
        self._send(Call(number, question))
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None and undo is not None:
                undo(future.result())
            elif number in self._waiting:
                self._send(Abandoned(number))
            raise

    def notify(self, note: object) -> None:
        """Send a message without an answer. It is dropped if the peer is gone."""
        self._send(note)

    async def close(self) -> None:
        """Send the pending messages, and close the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
            await self._gone

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._on_made()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self._take(message)
        except (FrameError, msgspec.DecodeError):
            logger.exception("the other process cannot be understood")
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for task in [*self._answering.values()]:
            task.cancel()
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.future.done():
                each.future.set_exception(IpcConnectionLost())
        self._on_lost()
        self._gone.set_result(None)

    # Handling of messages.

    def _take(self, message: object) -> None:
        if isinstance(message, Reply):
            self._answered(message)
        elif isinstance(message, CallRefusal):
            self._refused(message)
        elif isinstance(message, Call):
            task = self._loop.create_task(self._answer(message.number, message.question))
            self._answering[message.number] = task
            task.add_done_callback(partial(self._done, message.number))
        elif isinstance(message, Abandoned):
            if message.number in self._answering:
                self._answering[message.number].cancel()
        else:
            self._noted(message)

    def _noted(self, note: object) -> None:
        try:
            self._on_note(note)
        except Exception:
            # The note concerns one request; the connection serves others.
            logger.exception("a note of the other process cannot be taken")

    def _answered(self, answer: Reply) -> None:
        waiting = self._waiting.pop(answer.number, None)
        if waiting is None:
            return
        value = waiting.decoder.decode(answer.value)
        if not waiting.future.done():
            waiting.future.set_result(value)
        elif waiting.undo is not None:
            waiting.undo(value)

    def _refused(self, refusal: CallRefusal) -> None:
        waiting = self._waiting.pop(refusal.number, None)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_exception(error_of(refusal))

    async def _answer(self, number: int, question: object) -> None:
        try:
            value = await self._on_question(question)
        except PagemillError as error:
            self._send(refusal_of(number, error))
        except Exception:
            logger.exception("a question of the other process cannot be answered")
            self._send(refusal_of(number, internal_error()))
        else:
            self._send(Reply(number, msgspec.Raw(_encoder.encode(value))))

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        """Refuse a cancelled call, because the peer waits for an answer or a refusal to each call."""
        del self._answering[number]
        if task.cancelled():
            self._send(refusal_of(number, internal_error()))

    def _send(self, message: object) -> None:
        if self.lost:
            return
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(encode_message(WHAT, message, MAX_MESSAGE_BYTES))

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(outbox))


def refusal_of(number: int, error: PagemillError) -> CallRefusal:
    return CallRefusal(number, error.message, error.status, error.type, error.param, error.code, error.retry_after_s)


def error_of(refusal: CallRefusal) -> PagemillError:
    return PagemillError(
        refusal.message,
        status=refusal.status,
        type=refusal.kind,
        param=refusal.param,
        code=refusal.code,
        retry_after_s=refusal.retry_after_s,
    )
