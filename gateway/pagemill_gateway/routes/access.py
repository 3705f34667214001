"""The outermost ASGI middleware: writes one structured log line and the metrics of each request.

It creates the request's `RequestRecord`, which the routes fill. No text of clients is logged, except the request id,
which the HTTP middleware has checked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from functools import partial

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill_api.dialects.anthropic import message_batches
from pagemill_api.dialects.registry import LIVE_PATHS, PAGES, READY_PATHS, generating_routes
from pagemill_api.dialects.token_counts import TOKEN_COUNTS
from pagemill_api.route_names import RouteNames
from pagemill_gateway.metrics.beginnings import UNKNOWN_MODEL
from pagemill_gateway.request_record import RequestRecord
from pagemill_gateway.spans import write_spans
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import MODEL_NOT_FOUND, PagemillError
from pagemill_routing.brain.interface import RequestOutcome
from pagemill_servers.errors import noted_error
from pagemill_servers.request_middleware import request_id

logger = logging.getLogger("pagemill.gateway.access")

ROUTES = {
    *generating_routes(),
    *(each.path for each in TOKEN_COUNTS),
    *(each.path for each in PAGES),
    *(
        "/v1/models",
        "/v1/files",
        "/v1/batches",
        "/v1/conversations",
        "/detokenize",
        "/version",
        "/load",
        "/server_info",
        "/docs",
        "/runbooks",
        "/ui",
        "/",
    ),
    message_batches.PATH,
}
WITH_IDS = (
    "/runbooks",
    "/ui",
    "/v1/models",
    "/v1/responses",
    "/v1/conversations",
    "/v1/files",
    "/v1/batches",
    message_batches.PATH,
)
"""Routes whose paths continue with the id of an object."""
ROUTE_HEADER = b"x-pagemill-route"
"""The header of responses of engines, with policy, endpoint, predicted cached tokens and, for clients without a key,
the number of the decision. It is missing in a stream that began with a comment, before the engine was known.
"""
MIGRATIONS_HEADER = b"x-pagemill-migrations"
"""The header of answers that another engine continued before the headers were sent."""
PROBES = frozenset({"/health", "/livez", "/readyz", "/version", "/ping", *LIVE_PATHS, *READY_PATHS})
"""Routes that machines request every few seconds, which are logged only if they fail."""
NAMES = RouteNames(ROUTES | PROBES)


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request, with the request id that the HTTP middleware assigned."""
    record: RequestRecord = scope["state"]["record"]
    record.request_id = request_id(scope)
    return record


class AccessLog:
    def __init__(self, app: ASGIApp, worker: Worker) -> None:
        self._app = app
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(route=_route(scope["path"]))
        state = scope.setdefault("state", {})
        state["record"] = record

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *self._added_headers(record)]}
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except asyncio.CancelledError:
            record.client_left()  # a line of a batch, or a response in the background
            raise
        finally:
            record.request_id = state.get("request_id", "")
            error = noted_error(scope)
            if error is not None and not record.error_status:
                record.failed(error)
            record.status = record.status or record.error_status or 500
            if not record.model and record.route not in PROBES:
                record.model = await self._model_of(record)
            self._worker.metrics.finished(record)
            if record.finished and not record.is_low_priority:
                self._worker.brain.record_outcome(_outcome(record))
            trace_id = self._worker.tracing.finished(
                scope, partial(write_spans, record, scope["method"], time.monotonic())
            )
            if record.route not in PROBES or record.status >= 400:
                logger.info(_line(record, scope["method"], trace_id))

    async def _model_of(self, record: RequestRecord) -> str:
        """Return the model of a request that ended before an engine was known."""
        if record.asked_model and record.error_code != MODEL_NOT_FOUND:
            try:
                for each in await self._worker.brain.names():
                    if each.name == record.asked_model:
                        return each.model
            except PagemillError:
                logger.debug("the names of models are not known now")
        return UNKNOWN_MODEL

    def _added_headers(self, record: RequestRecord) -> Iterator[tuple[bytes, bytes]]:
        if record.route_header:
            yield ROUTE_HEADER, record.route_header.encode("ascii", "replace")
        if record.num_migrations:
            yield MIGRATIONS_HEADER, b"%d" % record.num_migrations
        if self._worker.draining:
            yield b"connection", b"close"


def _outcome(record: RequestRecord) -> RequestOutcome:
    """Return the outcome of a request, per prompt and sequence."""
    usage, num_choices = record.usage, max(1, record.num_choices)
    num_output_tokens = usage.completion_tokens // num_choices
    ttft_s = record.ttft_s if record.stream else None
    after_first_s = record.duration_s() - ttft_s if ttft_s is not None else None
    return RequestOutcome(
        deployment=record.deployment,
        num_prompt_tokens=usage.prompt_tokens // max(1, record.num_prompts),
        num_cached_tokens=usage.cached_tokens // max(1, record.num_prompts),
        num_output_tokens=num_output_tokens,
        ttft_ms=ttft_s * 1000 if ttft_s is not None else None,
        tpot_ms=after_first_s * 1000 / (num_output_tokens - 1)
        if after_first_s is not None and num_output_tokens > 1
        else None,
    )


def _route(path: str) -> str:
    """Return the route for logs and metrics; `other` for unknown paths, which must not create series."""
    return NAMES.find(path) or next((route for route in WITH_IDS if path.startswith(f"{route}/")), "other")


def _line(record: RequestRecord, method: str, trace_id: str) -> str:
    fields = {
        "event": "request",
        "request_id": record.request_id,
        "trace_id": trace_id,
        "method": method,
        "route": record.route,
        "status": record.status,
        "outcome": record.outcome,
        "arrived_at": round(time.time() - record.duration_s(), 3),
        "duration_ms": round(record.duration_s() * 1000, 1),
        "model": record.model,
        "deployment": record.deployment,
        "tenant": record.tenant,
        "response_id": record.response_id,
        "stream": record.stream,
        "endpoints": record.endpoints[:8],
        "decision": record.decision,
        "retries": record.num_retries,
        "queued_ms": round(record.queued_s * 1000, 1),
        "migrations": record.num_migrations,
        "migrated_tokens": record.num_migrated_tokens,
        "ttft_ms": round(record.ttft_s * 1000, 1) if record.ttft_s is not None else None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.usage.cached_tokens,
        "completion_tokens": record.usage.completion_tokens,
        "proposed_tokens": record.usage.proposed_tokens,
        "accepted_tokens": record.usage.accepted_tokens,
        "finish_reasons": sorted(record.finish_reasons),
        "ended_by_limit": record.ended_by_limit or None,
        "error": record.error_code,
    }
    return orjson.dumps({name: value for name, value in fields.items() if value}).decode()
