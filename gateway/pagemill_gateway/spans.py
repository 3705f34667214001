"""Writes the spans of one request from its record when the request is over, so that tracing does not slow it down.

    POST /v1/chat/completions          gateway, server; GenAI attributes
      prepare                          checks, template, tokens
      queue                            each wait for capacity
      migration                        from the end of one engine's part to the first token of the next engine
      chat smollm2                     one attempt at one engine, client
        queue, prefill, decode         the engine's phases: its own queue time, the rest by the gateway's clock

`pagemill_servers.tracing` names the attributes and exports.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pagemill_gateway.request_record import AttemptRecord, RequestRecord
from pagemill_servers.tracing.attributes import (
    ENGINE,
    GATEWAY,
    Attribute,
    SpanKind,
    engine_phases,
    of_model,
    of_request,
)

if TYPE_CHECKING:
    from pagemill_servers.tracing.messages import TraceWriter


def write_spans(record: RequestRecord, method: str, ended_at: float, trace: TraceWriter) -> None:
    """Write all spans of a request that ended at `ended_at`."""
    root = trace.add(
        GATEWAY,
        f"{method} {record.route}",
        record.started_at,
        ended_at,
        kind=SpanKind.SERVER,
        attributes=(*of_request(record, method), *_of_routing(record)),
        error=record.error_code,
    )
    if record.prepare_s is not None:
        trace.add(GATEWAY, "prepare", record.started_at, record.started_at + record.prepare_s, parent=root)
    for attempt in record.attempts:
        if attempt.queued_s:
            trace.add(GATEWAY, "queue", attempt.started_at - attempt.queued_s, attempt.started_at, parent=root)
        _write_migration(attempt, ended_at, root, trace)
        _write_attempt(record, attempt, ended_at, root, trace)


def _write_migration(attempt: AttemptRecord, ended_at: float, root: bytes, trace: TraceWriter) -> None:
    """Write the span in which another engine takes over the answer."""
    before = attempt.continued
    if before is None:
        return
    attributes: list[Attribute] = [
        ("pagemill.migration.reason", before.outcome),
        ("pagemill.migration.from", before.endpoint_id),
        ("pagemill.migration.to", attempt.endpoint_id),
        ("pagemill.migration.num_tokens", attempt.num_continued_tokens),
    ]
    end = attempt.first_token_at or _end(attempt, ended_at)
    trace.add(GATEWAY, "migration", _end(before, ended_at), end, parent=root, attributes=attributes)


def _write_attempt(
    record: RequestRecord, attempt: AttemptRecord, ended_at: float, root: bytes, trace: TraceWriter
) -> None:
    end = _end(attempt, ended_at)
    span = trace.add(
        GATEWAY,
        f"{record.operation} {record.model}",
        attempt.started_at,
        end,
        parent=root,
        kind=SpanKind.CLIENT,
        attributes=_of_attempt(record, attempt),
        error=None if attempt.outcome == "served" else attempt.outcome,
    )
    where: list[Attribute] = [("pagemill.endpoint", attempt.endpoint_id)]
    for name, began, ended in engine_phases(attempt.started_at, attempt.engine_queue_s, attempt.first_token_at, end):
        trace.add(ENGINE, name, began, ended, parent=span, kind=SpanKind.SERVER, attributes=where)


def _end(attempt: AttemptRecord, ended_at: float) -> float:
    return ended_at if attempt.ended_at is None else min(attempt.ended_at, ended_at)


def _of_routing(record: RequestRecord) -> Iterator[Attribute]:
    yield "pagemill.outcome", record.outcome
    if record.sampling is None:
        return
    yield "pagemill.deployment", record.deployment
    yield "pagemill.num_retries", record.num_retries
    yield "pagemill.num_migrations", record.num_migrations
    yield "pagemill.queued_ms", round(record.queued_s * 1000, 3)


def _of_attempt(record: RequestRecord, attempt: AttemptRecord) -> Iterator[Attribute]:
    yield from of_model(record)
    yield "pagemill.endpoint", attempt.endpoint_id
    yield "pagemill.routing.policy", attempt.policy
    yield "pagemill.routing.predicted_cached_tokens", attempt.predicted_cached_tokens
    yield "pagemill.attempt.outcome", attempt.outcome
    if attempt.outcome != "served":
        yield "error.type", attempt.outcome
