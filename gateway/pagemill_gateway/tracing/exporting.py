"""Exports spans to an OTLP/HTTP receiver, in batches, from a thread of their own. `spans` makes them.

Nothing waits for the receiver: while it is away, spans beyond a fixed number are dropped. The engines' spans are sent
from here as well, under their own service name, so engines need neither settings nor network access for it.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Tracer
from starlette.types import Scope

from pagemill_gateway.config import TracingConfig
from pagemill_gateway.request_record import RequestRecord
from pagemill_gateway.tracing import spans

GATEWAY = "pagemill-gateway"
ENGINE = "pagemill-engine"
EXPORT_TIMEOUT_S = 5.0
MAX_WAITING_SPANS = 8192
BATCH_DELAY_MS = 1000.0


class ExportedTraces:
    """Both services' tracers over one exporter."""

    def __init__(self, config: TracingConfig) -> None:
        exporter = OTLPSpanExporter(config.endpoint, headers=config.headers(), timeout=EXPORT_TIMEOUT_S)
        self._processor = BatchSpanProcessor(
            exporter, max_queue_size=MAX_WAITING_SPANS, schedule_delay_millis=BATCH_DELAY_MS
        )
        sampler = ParentBased(TraceIdRatioBased(config.sample_ratio))
        self._tracers = spans.Tracers(*(self._tracer(name, sampler) for name in (GATEWAY, ENGINE)))

    def finished(self, record: RequestRecord, scope: Scope) -> str:
        return spans.record_spans(record, scope, self._tracers)

    async def close(self) -> None:
        await asyncio.to_thread(self._processor.shutdown)

    def _tracer(self, service: str, sampler: ParentBased) -> Tracer:
        resource = Resource.create({SERVICE_NAME: service, SERVICE_VERSION: version("pagemill-gateway")})
        provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider.get_tracer("pagemill", version("pagemill-gateway"))
