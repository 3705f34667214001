"""The spans of one request, made from its record when it is over: while it runs, tracing costs nothing.

    POST /v1/chat/completions          gateway, server; GenAI attributes
      prepare                          checks, template, tokens
      queue                            each wait for capacity
      migration                        from the end of an engine's part to the first token of the next one's
      chat smollm2                     one attempt at one engine, client
        queue, prefill, decode         that engine; its own queue time, the rest by the gateway's clock

Names follow OpenTelemetry's GenAI and HTTP conventions; `pagemill.*` is for what these do not define. No text of
prompts or answers is ever exported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from pagemill_gateway.request_record import AttemptRecord, RequestRecord
from pagemill_protocol.dialects.registry import dialect_of
from pagemill_protocol.http.door import header

PROVIDER = "pagemill"
CARRIED = ("traceparent", "tracestate")
_propagator = TraceContextTextMapPropagator()


class Tracers(NamedTuple):
    gateway: Tracer
    engine: Tracer


class SpanClock:
    """Converts monotonic seconds of a record to the nanoseconds since 1970 that spans use."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def __call__(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._offset_ns


def record_spans(record: RequestRecord, scope: Scope, tracers: Tracers) -> str:
    """Start and end every span of the request; the trace's id in hex, empty where it is not sampled."""
    clock = SpanClock()
    root = tracers.gateway.start_span(
        f"{scope['method']} {record.route}",
        context=_parent(scope),
        kind=SpanKind.SERVER,
        start_time=clock(record.started_at),
    )
    if root.is_recording():
        root.set_attributes(dict(_of_request(record, scope["method"])))
        root.set_status(_status(record.error_code))
        _record_parts(record, set_span_in_context(root), tracers, clock)
    root.end(clock(time.monotonic()))
    context = root.get_span_context()
    return f"{context.trace_id:032x}" if context.trace_flags.sampled else ""


def _parent(scope: Scope) -> Context | None:
    """The client's trace, if it sent a valid one."""
    carrier = {name: value for name in CARRIED if (value := header(scope, name.encode()))}
    return _propagator.extract(carrier, Context()) if carrier else Context()


def _record_parts(record: RequestRecord, within: Context, tracers: Tracers, clock: SpanClock) -> None:
    if record.prepare_s is not None:
        started_at = record.started_at
        span = tracers.gateway.start_span("prepare", within, start_time=clock(started_at))
        span.end(clock(started_at + record.prepare_s))
    for attempt in record.attempts:
        if attempt.queued_s:
            span = tracers.gateway.start_span("queue", within, start_time=clock(attempt.started_at - attempt.queued_s))
            span.end(clock(attempt.started_at))
        _record_migration(attempt, within, tracers, clock)
        _record_attempt(record, attempt, within, tracers, clock)


def _record_migration(attempt: AttemptRecord, within: Context, tracers: Tracers, clock: SpanClock) -> None:
    """What the client waits for while another engine takes an answer over."""
    before = attempt.continued
    if before is None:
        return
    attributes: dict[str, AttributeValue] = {
        "pagemill.migration.reason": before.outcome,
        "pagemill.migration.from": before.endpoint_id,
        "pagemill.migration.to": attempt.endpoint_id,
        "pagemill.migration.num_tokens": attempt.num_continued_tokens,
    }
    start, end = _end(before), attempt.first_token_at or _end(attempt)
    span = tracers.gateway.start_span("migration", within, attributes=attributes, start_time=clock(start))
    span.end(clock(end))


def _record_attempt(
    record: RequestRecord, attempt: AttemptRecord, within: Context, tracers: Tracers, clock: SpanClock
) -> None:
    span = tracers.gateway.start_span(
        f"{_operation(record)} {record.model}",
        within,
        kind=SpanKind.CLIENT,
        attributes=dict(_of_attempt(record, attempt)),
        start_time=clock(attempt.started_at),
    )
    span.set_status(_status(None if attempt.outcome == "served" else attempt.outcome))
    for name, start, end in _phases(attempt):
        phase = tracers.engine.start_span(
            name,
            set_span_in_context(span),
            kind=SpanKind.SERVER,
            attributes={"pagemill.endpoint": attempt.endpoint_id},
            start_time=clock(start),
        )
        phase.end(clock(end))
    span.end(clock(_end(attempt)))


def _phases(attempt: AttemptRecord) -> Iterator[tuple[str, float, float]]:
    """The phases in the engine, as soon as a token came; before that they are unknown."""
    if attempt.first_token_at is None:
        return
    scheduled_at = min(attempt.started_at + attempt.engine_queue_s, attempt.first_token_at)
    yield "queue", attempt.started_at, scheduled_at
    yield "prefill", scheduled_at, attempt.first_token_at
    yield "decode", attempt.first_token_at, _end(attempt)


def _end(attempt: AttemptRecord) -> float:
    return time.monotonic() if attempt.ended_at is None else attempt.ended_at


def _status(error: str | None) -> Status:
    return Status(StatusCode.ERROR, error) if error else Status()


def _operation(record: RequestRecord) -> str:
    return dialect_of(record.dialect).operation


def _of_request(record: RequestRecord, method: str) -> Iterator[tuple[str, AttributeValue]]:
    yield "http.request.method", method
    yield "http.route", record.route
    yield "http.response.status_code", record.status
    yield "pagemill.request_id", record.request_id
    if record.error_code:
        yield "error.type", record.error_code
    if record.tenant:
        yield "pagemill.tenant", record.tenant
    if record.sampling is None:
        return
    yield from _of_model(record)
    yield "pagemill.deployment", record.deployment
    yield "pagemill.num_retries", record.num_retries
    yield "pagemill.num_migrations", record.num_migrations
    yield "pagemill.queued_ms", round(record.queued_s * 1000, 3)
    if record.ttft_s is not None:
        yield "pagemill.ttft_ms", round(record.ttft_s * 1000, 3)
    yield "gen_ai.response.model", record.model
    yield "gen_ai.response.id", record.response_id
    yield "gen_ai.response.finish_reasons", sorted(record.finish_reasons)
    yield "gen_ai.usage.input_tokens", record.prompt_tokens
    yield "gen_ai.usage.output_tokens", max(record.usage.completion_tokens, record.num_delivered)
    yield "gen_ai.usage.cache_read.input_tokens", record.usage.cached_tokens
    sampling = record.sampling
    yield "gen_ai.request.stream", record.stream
    yield "gen_ai.request.choice.count", record.num_choices
    yield "gen_ai.request.temperature", sampling.temperature
    yield "gen_ai.request.top_p", sampling.top_p
    yield "gen_ai.request.top_k", sampling.top_k
    if sampling.max_tokens is not None:
        yield "gen_ai.request.max_tokens", sampling.max_tokens
    if sampling.seed is not None:
        yield "gen_ai.request.seed", sampling.seed


def _of_model(record: RequestRecord) -> Iterator[tuple[str, AttributeValue]]:
    yield "gen_ai.operation.name", _operation(record)
    yield "gen_ai.provider.name", PROVIDER
    yield "gen_ai.request.model", record.model


def _of_attempt(record: RequestRecord, attempt: AttemptRecord) -> Iterator[tuple[str, AttributeValue]]:
    yield from _of_model(record)
    yield "pagemill.endpoint", attempt.endpoint_id
    yield "pagemill.routing.policy", attempt.policy
    yield "pagemill.routing.predicted_cached_tokens", attempt.predicted_cached_tokens
    yield "pagemill.outcome", attempt.outcome
    if attempt.outcome != "served":
        yield "error.type", attempt.outcome
