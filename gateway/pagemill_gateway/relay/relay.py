"""Runs one engine request with its attempts: gets an endpoint, sends, forwards frames, and continues elsewhere.

When an engine is lost, drains or hangs, another one with the same weights continues from the journal, and the client
gets one unbroken answer. An answer that no engine can continue is restarted if the client has got nothing of it;
otherwise it ends with an error, which the caller must report to the client. `routes` has the client's HTTP, and `brain`
chooses endpoints.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from hashlib import blake2b

import msgspec

from pagemill_gateway.limits.allowance import Allowance
from pagemill_gateway.metrics.worker import WorkerMetrics
from pagemill_gateway.relay.answer_stream import Frame
from pagemill_gateway.relay.delivery import AnswerBroken, Delivery, forward, forward_nowait
from pagemill_gateway.relay.growth import Growth
from pagemill_gateway.relay.journal import Journal, JournalCapacity
from pagemill_gateway.relay.keep_alive import KeepAlive
from pagemill_gateway.relay.sinks import Sink
from pagemill_gateway.relay.upstream import Upstream
from pagemill_gateway.request_record import RequestRecord
from pagemill_protocol.errors import PagemillError, bad_upstream, poison_request
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_routing.attempts.attempt_failures import TOO_SHORT, UpstreamFailure, record_failure
from pagemill_routing.attempts.attempts import Attempts
from pagemill_routing.brain.interface import (
    NOT_READY,
    OTHER_WEIGHTS,
    Assignment,
    Brain,
    CompletedRequest,
    FailureKind,
    RetryContext,
    RoutingRequest,
    Target,
)

LEAST_TIMED_TOKENS = 8
"""The number of tokens from which on an answer's time per token is measured."""
logger = logging.getLogger("pagemill.gateway.relay")


class Relay:
    def __init__(
        self,
        brain: Brain,
        upstream: Upstream,
        metrics: WorkerMetrics,
        keep_alive: KeepAlive,
        *,
        max_attempts: int,
        journal_tokens: int,
    ) -> None:
        self._brain = brain
        self._metrics = metrics
        self._upstream = upstream
        self._keep_alive = keep_alive
        self._max_attempts = max_attempts
        self.journal_capacity = JournalCapacity(journal_tokens)
        self.refused_contents: frozenset[bytes] = frozenset()
        """The contents of requests that crash engines (`brain.resilience.poison_memory`)."""

    async def run(
        self,
        target: Target,
        request: GenerateRequest,
        routing_request: RoutingRequest,
        sink: Sink,
        record: RequestRecord,
        allowance: Allowance | None = None,
    ) -> Usage:
        """Write the whole answer to `sink`, and return its usage. `allowance` is for a caller with token limits.

        Raises `PagemillError` if the client has got nothing of the answer, and `AnswerBroken` if it has.
        """
        if self.refused_contents and content_of(request, target.deployment, record.account) in self.refused_contents:
            raise poison_request()
        journal = Journal(request, self.journal_capacity, record.ticket.key)
        growth = Growth(allowance) if allowance is not None else None
        delivery = Delivery(
            target, request, routing_request, sink, record, journal, Attempts(self._max_attempts), growth
        )
        try:
            return await self._serve(delivery)
        except PagemillError as error:
            if not sink.delivered:
                raise
            raise AnswerBroken(error, reported=False) from error
        finally:
            journal.close()
            if growth is not None:
                await growth.close()

    async def _serve(self, delivery: Delivery) -> Usage:
        record = delivery.record
        retry: RetryContext | None = None
        while True:
            assignment = await self._choose(delivery, retry)
            num_tokens = delivery.journal.num_tokens
            try:
                if pause_s := delivery.attempts.pause_s(assignment.endpoint_id):
                    await asyncio.sleep(pause_s)
                usage, served = await self._attempt(assignment, delivery)
            except UpstreamFailure as failure:
                self._brain.failed(assignment, failure.kind)
                retry = self._judge(failure, assignment, delivery, got_tokens=delivery.journal.num_tokens > num_tokens)
            except AnswerBroken:
                delivery.attempt.ended("request")
                # The engine works and reported the error itself: no engine could serve this request.
                self._brain.failed(assignment, "request")
                self._metrics.attempt(record.model, "request")
                record.last_failure = "request"
                raise
            except BaseException:
                self._brain.finished(assignment)
                raise
            else:
                delivery.attempt.ended("served")
                self._brain.finished(assignment, served)
                self._metrics.attempt(record.model, "served")
                if not delivery.continues:
                    self._metrics.cached(record.model, assignment, usage.cached_tokens)
                return usage

    async def _choose(self, delivery: Delivery, retry: RetryContext | None) -> Assignment:
        attempts = delivery.attempts
        if pause_s := delivery.engine_failures.take_pause_s():
            await self._keep_alive.during(
                asyncio.sleep(pause_s), delivery.sink.write_waiting, event=delivery.sink.waiting
            )
        try:
            assignment = await self._ask_brain(delivery, retry)
        except PagemillError as error:
            if retry is not None and error.code == OTHER_WEIGHTS and not delivery.sink.delivered:
                delivery.begin_anew()
                return await self._choose(delivery, retry._replace(weights_digest="", num_tokens=0))
            is_left = error.code in (NOT_READY, OTHER_WEIGHTS) and (attempts.num_counted or delivery.sink.delivered)
            raise (attempts.verdict() if is_left else error) from error
        if retry is not None:
            self._tried_again(delivery, retry.kind)
        return assignment

    async def _ask_brain(self, delivery: Delivery, retry: RetryContext | None) -> Assignment:
        target, request, attempts, record = delivery.target, delivery.request, delivery.attempts, delivery.record
        asked_at = time.perf_counter()
        ticket = msgspec.structs.replace(
            record.ticket,
            priority=request.priority,
            waited_s=target.queued_s + attempts.queued_s,
            num_sequences=request.sampling.num_sequences,
            max_tokens=request.sampling.max_tokens,
            num_logprobs=request.sampling.num_alternatives or 0,
            num_refusals=attempts.num_refusals,
            paid=attempts.count > 0,
        )
        question = self._brain.choose(target, attempts.tried, delivery.routing_request, ticket=ticket, retry=retry)
        expected = partial(self._brain.expected_s, target.model, ticket)
        sink = delivery.sink
        assignment = await self._keep_alive.during(question, sink.write_waiting, expected, sink.waiting)
        self._metrics.routed(target.model, assignment, time.perf_counter() - asked_at - assignment.queued_s)
        if assignment.queued_s:
            attempts.queued(assignment.queued_s)
            self._metrics.queued(target.model, assignment.queued_s)
            record.queued_s = max(record.queued_s, target.queued_s + attempts.queued_s)
        return assignment

    async def _attempt(self, assignment: Assignment, delivery: Delivery) -> tuple[Usage, CompletedRequest]:
        body = delivery.begin(assignment)
        liveness = partial(self._brain.liveness, assignment.endpoint_id)

        def accepted() -> None:
            self._brain.accepted(assignment)
            delivery.is_accepted = True

        sent_at = time.perf_counter()
        freed = partial(self._brain.freed, assignment)
        stream = await self._upstream.open(assignment, body, delivery.record.request_id, liveness, accepted, freed)
        if delivery.growth is not None:
            delivery.growth.opened(stream)
        try:
            frames = await stream.read()
            if frames[0][0].error is None:
                self._started(assignment, delivery, time.perf_counter() - sent_at)
            num_tokens, waited_s = delivery.journal.num_tokens + _count_tokens(frames), stream.waited_s
            take = partial(forward_nowait, stream, delivery)
            while frames:
                usage = await forward(frames, stream, delivery)
                if usage is not None:
                    ms_per_token = _ms_per_token(delivery.journal.num_tokens - num_tokens, stream.waited_s - waited_s)
                    return usage, CompletedRequest(usage.completion_tokens, ms_per_token)
                frames = await stream.read(take)
        finally:
            stream.close()
        raise UpstreamFailure("lost", TOO_SHORT)

    def _started(self, assignment: Assignment, delivery: Delivery, ttft_s: float) -> None:
        """Report the first frame to the brain and the metrics."""
        if not delivery.request.stream:
            self._brain.started(assignment)
            return
        self._brain.started(assignment, 1000 * ttft_s)
        self._metrics.first_token(delivery.record.model, assignment, ttft_s)

    def _judge(
        self, failure: UpstreamFailure, assignment: Assignment, delivery: Delivery, *, got_tokens: bool
    ) -> RetryContext:
        """Return the context of the next attempt. Raises `PagemillError` if there must be none."""
        journal, attempts = delivery.journal, delivery.attempts
        delivery.record.last_failure = failure.kind
        record_failure(
            failure,
            assignment,
            attempts,
            delivery.engine_failures,
            progressed=got_tokens,
            is_accepted=delivery.is_accepted,
            can_continue=journal.can_continue,
        )
        self._note(failure, assignment, delivery)
        if delivery.sink.delivered and (delivery.sink.is_within or not journal.can_continue):
            raise bad_upstream(f"The answer broke off: {failure.message}") from failure
        if attempts.exhausted:
            raise attempts.verdict() from failure
        if not journal.can_continue:
            delivery.begin_anew()
        return RetryContext(
            assignment.decision,
            assignment.endpoint_id,
            failure.kind,
            journal.weights_digest,
            journal.num_kept,
            failures := delivery.engine_failures.recorded,
            content_of(delivery.request, delivery.target.deployment, delivery.record.account) if failures else b"",
        )

    def _tried_again(self, delivery: Delivery, reason: FailureKind) -> None:
        record, journal = delivery.record, delivery.journal
        if not journal.can_continue:
            self._metrics.retry(record.model, reason)
            record.num_retries += 1
            return
        self._metrics.migrated(record.model, reason, journal.num_kept)
        record.num_migrations += 1
        record.num_migrated_tokens += journal.num_kept

    def _note(self, failure: UpstreamFailure, assignment: Assignment, delivery: Delivery) -> None:
        record = delivery.record
        delivery.attempt.ended(failure.kind)
        self._metrics.attempt(record.model, failure.kind)
        logger.info(
            "request %s: attempt %d at %s failed after %d tokens (%s): %s",
            record.request_id,
            delivery.attempts.count,
            assignment.endpoint_id,
            delivery.journal.num_tokens,
            failure.kind,
            failure.message,
        )


def _count_tokens(frames: list[Frame]) -> int:
    return sum(len(meta.token_ids) for meta, _ in frames)


def _ms_per_token(num_tokens: int, waited_s: float) -> float | None:
    """Return the time per token after the first frames, without the client's reading time; `None` for few tokens."""
    return waited_s * 1000 / num_tokens if num_tokens >= LEAST_TIMED_TOKENS else None


def content_of(request: GenerateRequest, deployment: str, account: str) -> bytes:
    """Return the hash of what a request asks an engine to compute, for one account: token ids and parameters without
    what gateways assign, such as the seed. A poison request is known again by it."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    computed = (account, deployment, request.adapter_digest, request.prompt_token_ids, sampling, request.pooling)
    return blake2b(msgspec.msgpack.encode(computed), digest_size=16).digest()
