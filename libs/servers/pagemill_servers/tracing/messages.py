"""OTLP's messages: spans of finished requests. `exporting` sends them.

Spans are written directly into the message, through the classes that OpenTelemetry generates from its schema: a tracing
SDK makes, locks, copies and converts each span first, which takes about five times as long.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status

from pagemill_servers.tracing.attributes import Attribute, SpanKind, Value
from pagemill_servers.tracing.context import TraceContext

SCOPE = "pagemill"


class SpanBatch:
    """Spans of several requests, grouped by service as OTLP requires."""

    def __init__(self) -> None:
        self._message = ExportTraceServiceRequest()
        self._services: dict[str, ScopeSpans] = {}
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def trace(self, context: TraceContext) -> TraceWriter:
        return TraceWriter(self, context)

    def span(self, service: str) -> Span:
        """Return a new, empty span of a service."""
        if service not in self._services:
            group = self._message.resource_spans.add()
            group.resource.attributes.add(key="service.name").value.string_value = service
            group.resource.attributes.add(key="service.version").value.string_value = version("pagemill-protocol")
            self._services[service] = group.scope_spans.add()
            self._services[service].scope.name = SCOPE
        span: Span = self._services[service].spans.add()
        return span

    def unix_ns(self, at_s: float) -> int:
        """Return the Unix time in ns of a time on the monotonic clock."""
        return int(at_s * 1e9) + self._offset_ns

    def encoded(self) -> bytes:
        encoded: bytes = self._message.SerializeToString()
        return encoded


class TraceWriter:
    """Adds the spans of one request."""

    def __init__(self, batch: SpanBatch, context: TraceContext) -> None:
        self._batch = batch
        self._context = context

    def add(
        self,
        service: str,
        name: str,
        start_s: float,
        end_s: float,
        *,
        parent: bytes = b"",
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Iterable[Attribute] = (),
        error: str | None = None,
    ) -> bytes:
        """Add a span and return its id. Times are of the monotonic clock; without `parent`, the client's span is the
        parent."""
        span = self._batch.span(service)
        span.trace_id = self._context.trace_id
        span.trace_state = self._context.state
        span.span_id = span_id = secrets.token_bytes(8)
        span.parent_span_id = parent or self._context.parent_id
        span.name = name
        span.kind = Span.SpanKind.ValueType(kind)
        span.start_time_unix_nano = self._batch.unix_ns(start_s)
        span.end_time_unix_nano = self._batch.unix_ns(end_s)
        for key, value in attributes:
            _set(span.attributes.add(key=key).value, value)
        if error is not None:
            span.status.code = Status.STATUS_CODE_ERROR
            span.status.message = error
        return span_id


def _set(target: AnyValue, value: Value | Sequence[str]) -> None:
    match value:
        case str():
            target.string_value = value
        case bool():
            target.bool_value = value
        case int():
            target.int_value = value
        case float():
            target.double_value = value
        case _:
            target.array_value.SetInParent()
            for each in value:
                target.array_value.values.add().string_value = each


WriteSpans = Callable[[TraceWriter], None]
"""Adds the spans of one request to a writer."""
