"""Traces of requests that clients send to this engine directly. Behind a gateway, the gateway exports its part.

    POST /v1/chat/completions          server; GenAI attributes
      queue, prefill, decode           of each prompt, as soon as a token came

An ASGI layer gives each request of a generating route a record, which the route fills; when the request is over,
`pagemill_servers.tracing` makes and exports the spans.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill_api.dialects.registry import dialect_of, generating_routes
from pagemill_api.openai.render import add_usage
from pagemill_api.route_names import RouteNames
from pagemill_engine.server.answer import Answer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_servers.tracing.attributes import ENGINE, SpanKind, engine_phases, of_request
from pagemill_servers.tracing.tracing import Tracing

if TYPE_CHECKING:
    from pagemill_servers.tracing.messages import TraceWriter


@dataclass(slots=True)
class TracedRequest:
    """One request to a generating route. Times are those of the monotonic clock."""

    route: str
    started_at: float = field(default_factory=time.monotonic)
    request_id: str = ""
    tenant: str = ""
    status: int = 0
    error: PagemillError | None = None
    """Why the request was refused."""
    requests: Sequence[GenerateRequest] = ()
    """The request's prompts; empty if it was refused before it was parsed."""
    answer: Answer = field(default_factory=Answer)

    def forget_frames(self) -> None:
        """Drop the error's traceback: its frames refer to the body, the prompts and this record, and only the garbage
        collector would free such a cycle, which large bodies hardly make run."""
        if self.error is not None:
            self.error.__traceback__ = None

    @property
    def error_code(self) -> str | None:
        error = self.error or self.answer.error
        if error is None:
            return str(self.status) if self.status >= 400 else None
        return error.code or error.type

    @property
    def operation(self) -> str:
        return dialect_of(self.requests[0].dialect).operation

    @property
    def model(self) -> str:
        return self.requests[0].model

    @property
    def response_id(self) -> str:
        return self.requests[0].response_id or self.requests[0].request_id

    @property
    def stream(self) -> bool:
        return self.requests[0].stream

    @property
    def sampling(self) -> SamplingParams | None:
        return self.requests[0].sampling if self.requests else None

    @property
    def num_choices(self) -> int:
        return sum(request.sampling.n for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def usage(self) -> Usage:
        return add_usage(*(part.processor.usage for part in self.answer.parts))

    @property
    def output_tokens(self) -> int:
        return self.usage.completion_tokens

    @property
    def finish_reasons(self) -> set[str]:
        return {reason for part in self.answer.parts for reason in part.processor.finish_reasons}

    @property
    def ttft_s(self) -> float | None:
        first = [part.timing.first_token_s for part in self.answer.parts if part.timing.first_token_s is not None]
        return min(first) - self.started_at if first and self.stream else None


def record_of(scope: Scope) -> TracedRequest:
    record: TracedRequest = scope["state"]["record"]
    return record


class TraceRequests:
    """ASGI middleware that traces requests. It is outside the layer that assigns request ids."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing
        self._routes = RouteNames(generating_routes())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.find(scope["path"]) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        record = TracedRequest(route)
        state = scope.setdefault("state", {})
        state["record"] = record

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            record.request_id = state.get("request_id", "")
            self._tracing.finished(scope, partial(_write_spans, record, scope["method"], time.monotonic()))
            record.forget_frames()


def _write_spans(record: TracedRequest, method: str, ended_at: float, trace: TraceWriter) -> None:
    root = trace.add(
        ENGINE,
        f"{method} {record.route}",
        record.started_at,
        ended_at,
        kind=SpanKind.SERVER,
        attributes=of_request(record, method),
        error=record.error_code,
    )
    for part in record.answer.parts:
        timing = part.timing
        for name, began, ended in engine_phases(
            timing.arrival_s, timing.queue_s, timing.first_token_s, timing.last_token_s
        ):
            trace.add(ENGINE, name, began, ended, parent=root, kind=SpanKind.SERVER)
