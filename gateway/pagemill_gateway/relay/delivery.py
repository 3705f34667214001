"""Delivers one answer: checks frames, forwards them to the client, and notes them in the journal.

The journal always equals what the client has got, so another engine can continue exactly there. `relay.relay` decides
about continuations.
"""

from __future__ import annotations

import msgspec

from pagemill_gateway.relay.answer_stream import AnswerStream, Frame
from pagemill_gateway.relay.growth import Growth
from pagemill_gateway.relay.journal import Journal, JournalGap
from pagemill_gateway.relay.sinks import Sink
from pagemill_gateway.request_record import AttemptRecord, RequestRecord
from pagemill_protocol.errors import ENGINE_CRASHED, ENGINE_FAILED, RENDERING_FAILED, PagemillError
from pagemill_protocol.frames import PartMeta
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest, Usage
from pagemill_routing.attempts.attempt_failures import DECLINES, UpstreamFailure
from pagemill_routing.attempts.attempts import Attempts
from pagemill_routing.attempts.engine_failures import EngineFailures
from pagemill_routing.brain.interface import Assignment, FailureKind, RoutingRequest, Target

_encoder = msgspec.msgpack.Encoder()


class AnswerBroken(Exception):
    """The answer ended early after the client had got a part of it.

    `error` is the cause. `reported`: the client has already got it as the engine's error event.
    """

    def __init__(self, error: PagemillError, *, reported: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.reported = reported


class Delivery:
    """One engine request with its attempts."""

    def __init__(
        self,
        target: Target,
        request: GenerateRequest,
        routing_request: RoutingRequest,
        sink: Sink,
        record: RequestRecord,
        journal: Journal,
        attempts: Attempts,
        growth: Growth | None = None,
    ) -> None:
        """`growth` reserves tokens, if the caller has token limits."""
        self.target = target
        self.request = request
        self.num_choices = (request.prompt_index + 1) * request.sampling.n
        """The limit for the numbers of choices in frames."""
        self.routing_request = routing_request
        self.sink = sink
        self.record = record
        self.journal = journal
        self.attempts = attempts
        self.growth = growth
        self.engine_failures = EngineFailures()
        self.attempt: AttemptRecord
        """The latest attempt; set by `begin`."""
        self.is_accepted = False
        """Whether the engine of the latest attempt has accepted the request."""
        self.continues = False
        """Whether the latest attempt continues the answer of another one."""

    def begin(self, choice: Assignment) -> bytes:
        """Begin an attempt, and return the encoded request.

        Each attempt has its own id, because the engine may not know yet that the previous one has ended.
        """
        self.attempts.record_choice(choice.endpoint_id)
        self.is_accepted = False
        self.sink.begin()
        request = self.journal.continuation()
        self.continues = bool(request.resume)
        before = self.attempt if self.continues else None
        self.attempt = self.record.chosen(choice)
        self.attempt.continued, self.attempt.num_continued_tokens = before, self.journal.num_kept
        if self.attempts.count > 1:
            request_id = f"{request.request_id}-try{self.attempts.count}"
            response_id = request.response_id or request.request_id
            request = msgspec.structs.replace(request, request_id=request_id, response_id=response_id)
        if self.growth is not None:
            allowance = self.growth.begin()
            request = msgspec.structs.replace(request, token_allowance=allowance)
        cached = choice.predicted_cached_tokens
        return _encoder.encode(msgspec.structs.replace(request, predicted_cached_tokens=cached) if cached else request)

    def begin_anew(self) -> None:
        """Drop all tokens to restart the answer, because no engine can continue it and the client has got nothing."""
        self.record.num_delivered -= self.journal.num_tokens
        if self.growth is not None:
            self.growth.begin_anew()
        self.journal.begin_anew()


async def forward(frames: list[Frame], stream: AnswerStream, delivery: Delivery) -> Usage | None:
    """Forward and note a group of frames. Return the usage if the last frame is among them, otherwise None."""
    if any(isinstance(meta, PartMeta) for meta, _ in frames):
        return await _forward_one_by_one(frames, stream, delivery)
    metas = [meta for meta, _ in frames]
    failed = metas.pop() if metas[-1].error is not None else None
    payloads, closing = _checked(frames, metas, delivery)
    _count_frames(metas, delivery)  # before the client has them: it may be slow
    if payloads or closing is not None:
        await delivery.sink.take(payloads, closing)
    _note(metas, stream, delivery)
    if failed is not None:
        await _pass_on_error(failed, frames[-1][1], delivery.sink)
    return (metas[-1].usage or Usage()) if closing is not None else None


async def _forward_one_by_one(frames: list[Frame], stream: AnswerStream, delivery: Delivery) -> Usage | None:
    usage: Usage | None = None
    for frame in frames:
        meta, payload = frame
        if not isinstance(meta, PartMeta):
            usage = await forward([frame], stream, delivery)
            continue
        _checked([frame], [meta], delivery)
        _count_frames([meta], delivery)
        await delivery.sink.take_part(payload, meta)
        _note([meta], stream, delivery)
        usage = (meta.usage or Usage()) if meta.last else None
    return usage


def forward_nowait(stream: AnswerStream, delivery: Delivery, frames: list[Frame]) -> bool:
    """Forward and note frames without waiting. Return false and do nothing at the end or if the client is slow."""
    meta, payload = frames[-1]
    if meta.last or meta.error is not None or isinstance(meta, PartMeta):
        return False
    if len(frames) > 1:
        metas = [each for each, _ in frames]
        if any(isinstance(each, PartMeta) for each in metas):
            return False
        payloads, _ = _checked(frames, metas, delivery)
        if payloads and not delivery.sink.take_nowait(payloads):
            return False
        _count_frames(metas, delivery)
        _note(metas, stream, delivery)
        return True
    journal = delivery.journal
    try:
        journal.check_next(meta)
    except JournalGap as gap:
        raise _broken(gap) from gap
    if not 0 <= meta.choice < delivery.num_choices:
        raise _not_asked_for(meta)
    if payload and not delivery.sink.take_nowait([payload]):
        return False
    if delivery.growth is not None:
        delivery.growth.count(meta)
    delivery.record.count(meta, delivery.attempt)
    journal.note(meta, stream.weights_digest)
    return True


def _checked(frames: list[Frame], metas: list[FrameMeta], delivery: Delivery) -> tuple[list[bytes], bytes | None]:
    """Check frames; return their payloads, and that of the last frame or None. Raises `UpstreamFailure`."""
    try:
        delivery.journal.check(metas)
    except JournalGap as gap:
        raise _broken(gap) from gap
    payloads: list[bytes] = []
    closing: bytes | None = None
    num_choices = delivery.num_choices
    for meta, payload in frames[: len(metas)]:
        if not 0 <= meta.choice < num_choices:
            raise _not_asked_for(meta)
        if meta.last:
            closing = payload
        elif payload:
            payloads.append(payload)
    return payloads, closing


def _broken(gap: JournalGap) -> UpstreamFailure:
    return UpstreamFailure("broken", f"The engine's frames do not follow each other: {gap}.")


def _not_asked_for(meta: FrameMeta) -> UpstreamFailure:
    return UpstreamFailure("broken", f"The engine sent choice {meta.choice}, which was not asked for.")


def _count_frames(metas: list[FrameMeta], delivery: Delivery) -> None:
    """Count the tokens that the engine has generated, whether or not the client has them yet."""
    if delivery.growth is not None:
        for meta in metas:
            delivery.growth.count(meta)


def _note(metas: list[FrameMeta], stream: AnswerStream, delivery: Delivery) -> None:
    """Note frames that the client has got."""
    record, attempt, journal, digest = delivery.record, delivery.attempt, delivery.journal, stream.weights_digest
    for meta in metas:
        record.count(meta, attempt)
        journal.note(meta, digest)


async def _pass_on_error(meta: FrameMeta, payload: bytes, sink: Sink) -> None:
    """Raise the error of an engine's error frame: `UpstreamFailure` if another engine may serve the request."""
    status = meta.error_status or 500
    message = meta.error or "The engine failed this request."
    error = PagemillError(message, status=status, type=meta.error_type, param=meta.error_param, code=meta.error_code)
    if status in (429, 503):
        raise UpstreamFailure(_kind_of(error), error.message)
    if status >= 500 and error.code != RENDERING_FAILED:
        raise UpstreamFailure("request", error.message)
    if not sink.delivered:
        raise error
    if payload:
        await sink.take([payload], None)
    raise AnswerBroken(error, reported=bool(payload))


def _kind_of(error: PagemillError) -> FailureKind:
    """Return the kind of failure for a refusal within an answer."""
    if error.code == ENGINE_CRASHED:
        return "crashed"
    if error.code == ENGINE_FAILED:
        return "killed"
    return "declined" if error.code in DECLINES else "refused"
