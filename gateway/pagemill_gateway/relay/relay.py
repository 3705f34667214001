"""One engine request through as many attempts as it may have: choose, send, pass frames on, account, try elsewhere.

The rule of retry: as long as the client has seen nothing of this answer, another engine may give it. Afterwards the
answer ends with an error, which the caller must tell the client. The relay knows nothing of HTTP on the client's side
(`routes` does) and makes no decision on where to go (`brain` does).
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

import msgspec

from pagemill_gateway.admission.attempts import Attempts
from pagemill_gateway.brain.interface import NOT_READY, Ask, Brain, Choice, Target
from pagemill_gateway.metrics import GatewayMetrics
from pagemill_gateway.relay.keep_alive import KeepAlive
from pagemill_gateway.relay.record import RequestRecord
from pagemill_gateway.relay.sinks import Sink
from pagemill_gateway.relay.upstream import Frame, Upstream, UpstreamFailure, parse_error
from pagemill_protocol.errors import PagemillError, bad_upstream, internal_error
from pagemill_protocol.generate import FrameMeta, GenerateRequest, Usage

_encoder = msgspec.msgpack.Encoder()
logger = logging.getLogger("pagemill.gateway.relay")


class AnswerBroken(Exception):
    """The answer ended early after the client had seen part of it.

    `error` is what happened; `told` whether the client already got it as the engine's own error event.
    """

    def __init__(self, error: PagemillError, *, told: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.told = told


class Relay:
    def __init__(
        self, brain: Brain, upstream: Upstream, metrics: GatewayMetrics, keep_alive: KeepAlive, max_attempts: int
    ) -> None:
        self._brain = brain
        self._metrics = metrics
        self._upstream = upstream
        self._keep_alive = keep_alive
        self._max_attempts = max_attempts

    async def run(self, target: Target, request: GenerateRequest, ask: Ask, sink: Sink, record: RequestRecord) -> Usage:
        """The whole answer into `sink`; returns its usage.

        Raises `PagemillError` when the client has seen nothing of it, `AnswerBroken` when it has.
        """
        attempts = Attempts(self._max_attempts)
        while True:
            choice = await self._choose(target, attempts, request, ask, sink, record)
            try:
                if pause_s := attempts.pause_s(choice.endpoint_id):
                    await asyncio.sleep(pause_s)
                attempts.chose(choice.endpoint_id)
                record.chosen(choice)
                usage = await self._attempt(choice, attempts.count, request, sink, record)
            except UpstreamFailure as failure:
                self._brain.failed(choice, failure.kind)
                self._note(failure, choice, attempts, record)
                if sink.delivered:
                    self._metrics.stream_broke(record.model, failure.kind)
                    raise AnswerBroken(
                        bad_upstream(f"The answer broke off: {failure.message}"), told=False
                    ) from failure
                if attempts.exhausted:
                    raise attempts.verdict() from failure
                self._metrics.retry(record.model, failure.kind)
                record.num_retries += 1
            except AnswerBroken:
                # The engine works and said so itself: this one request failed there.
                self._brain.failed(choice, "request")
                self._metrics.attempt(record.model, choice.endpoint_id, "request")
                self._metrics.stream_broke(record.model, "request")
                raise
            except BaseException:
                self._brain.finished(choice)
                raise
            else:
                self._brain.finished(choice, usage.completion_tokens)
                self._metrics.cached(record.model, choice, usage.cached_tokens)
                self._metrics.attempt(record.model, choice.endpoint_id, "served")
                return usage

    async def _choose(
        self, target: Target, attempts: Attempts, request: GenerateRequest, ask: Ask, sink: Sink, record: RequestRecord
    ) -> Choice:
        asked_at = time.perf_counter()
        claim = record.claim._replace(
            priority=request.priority,
            waited_s=target.queued_s + attempts.queued_s,
            num_sequences=request.sampling.num_sequences,
            max_tokens=request.sampling.max_tokens,
            num_refusals=attempts.num_refusals,
            paid=attempts.count > 0,
        )
        question = self._brain.choose(target, attempts.tried, ask, claim=claim)
        try:
            choice = await self._keep_alive.during(question, sink.comment)
        except PagemillError as error:
            raise (attempts.verdict() if attempts.num_counted and error.code == NOT_READY else error) from error
        self._metrics.routed(target.model, choice, time.perf_counter() - asked_at - choice.queued_s)
        if choice.queued_s:
            attempts.queued(choice.queued_s)
            self._metrics.queued(target.model, choice.queued_s)
            record.queued_s = max(record.queued_s, target.queued_s + attempts.queued_s)
        return choice

    async def _attempt(
        self, choice: Choice, attempt: int, request: GenerateRequest, sink: Sink, record: RequestRecord
    ) -> Usage:
        is_alive = partial(self._brain.alive, choice)
        sent_at = time.perf_counter()
        async with self._upstream.generate(choice, _encode(request, attempt), record.request_id, is_alive) as stream:
            self._brain.accepted(choice)
            frames = await stream.read()
            self._brain.started(choice)
            if request.stream:
                self._metrics.first_token(record.model, choice, time.perf_counter() - sent_at)
            while frames:
                usage = await _pass_on(frames, request, sink, record)
                if usage is not None:
                    await stream.finish()
                    return usage
                frames = await stream.read()
        raise UpstreamFailure("broken", "The engine's answer ended before its last frame.")

    def _note(self, failure: UpstreamFailure, choice: Choice, attempts: Attempts, record: RequestRecord) -> None:
        self._metrics.attempt(record.model, choice.endpoint_id, failure.kind)
        if failure.kind == "refused":
            attempts.refused(failure.message)
        elif failure.kind == "declined":
            attempts.declined(failure.message)
        else:
            attempts.broke(failure.message)
        logger.info(
            "request %s: attempt %d at %s failed (%s): %s",
            record.request_id,
            attempts.count,
            choice.endpoint_id,
            failure.kind,
            failure.message,
        )


async def _pass_on(frames: list[Frame], request: GenerateRequest, sink: Sink, record: RequestRecord) -> Usage | None:
    """Hand the payloads of one group of frames on; the usage once the last frame was among them."""
    payloads: list[bytes] = []
    closing: bytes | None = None
    for meta, payload in frames:
        if meta.error is not None:
            await _pass_on_error(meta, payload, payloads, sink)
        _check_choice(meta, request)
        record.saw(meta)
        if meta.last:
            closing = payload
        elif payload:
            payloads.append(payload)
    if payloads or closing is not None:
        await sink.take(payloads, closing)
    return (frames[-1][0].usage or Usage()) if closing is not None else None


async def _pass_on_error(meta: FrameMeta, payload: bytes, before: list[bytes], sink: Sink) -> None:
    """The engine failed this request. Always raises: what, depends on whether the client has seen anything."""
    status = meta.error_status or 500
    message = meta.error or "The engine failed to process this request."
    if not sink.delivered:
        if status in (429, 503):
            raise UpstreamFailure("refused", message)
        if status >= 500:
            raise UpstreamFailure("request", message)
        raise parse_error(payload.removeprefix(b"data: "), status, message)
    await sink.take([*before, payload] if payload else before, None)
    error = internal_error(message) if status >= 500 else PagemillError(message, status=status)
    raise AnswerBroken(error, told=bool(payload))


def _encode(request: GenerateRequest, attempt: int) -> bytes:
    """The body of one attempt. A retry has its own id: the engine may not know yet that the one before has ended."""
    if attempt > 1:
        response_id = request.response_id or request.request_id
        request = msgspec.structs.replace(
            request, request_id=f"{request.request_id}-try{attempt}", response_id=response_id
        )
    return _encoder.encode(request)


def _check_choice(meta: FrameMeta, request: GenerateRequest) -> None:
    if not 0 <= meta.choice < (request.prompt_index + 1) * request.sampling.n:
        raise UpstreamFailure("broken", f"The engine sent choice {meta.choice}, which was not asked for.")
