"""An OTLP/HTTP receiver that decodes spans with OpenTelemetry's own classes, in place of a collector."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from killable_server import cut_off, serve
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-00"}


class Receiver:
    """Stores spans as plain values; `statuses` are its first answers, before it accepts spans."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.statuses: list[int] = []
        self.url = ""

    async def take(self, http: web.Request) -> web.Response:
        self.headers.append(http.headers.get("x-tenant", ""))
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        for group in ExportTraceServiceRequest.FromString(await http.read()).resource_spans:
            service = _attributes(group.resource.attributes)["service.name"]
            self.spans += [_span(span, service) for scope in group.scope_spans for span in scope.spans]
        return web.Response()

    def named(self, name: str, service: str = "pagemill-gateway") -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name and span["service"] == service]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else []


def _span(span: Any, service: str) -> dict[str, Any]:
    return {
        "service": service,
        "name": span.name,
        "kind": span.kind,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "start": span.start_time_unix_nano,
        "end": span.end_time_unix_nano,
        "failed": span.status.code == 2,
        "attributes": _attributes(span.attributes),
    }


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    found = Receiver()
    app = web.Application()
    app.router.add_post("/v1/traces", found.take)
    runner, port = await serve(app, 0)
    found.url = f"http://127.0.0.1:{port}/v1/traces"
    yield found
    await cut_off(runner)
