"""Attributes of spans: names of OpenTelemetry's GenAI and HTTP conventions, and `pagemill.*` for what these do not
define. Gateway and engine use the same. Attributes never contain text of prompts or answers."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from pagemill_protocol.request.generate import Usage
from pagemill_protocol.request.sampling import SamplingParams

GATEWAY = "pagemill-gateway"
ENGINE = "pagemill-engine"
PROVIDER = "pagemill"

Value = str | bool | int | float
Attribute = tuple[str, Value | Sequence[str]]


class SpanKind(enum.IntEnum):
    """Kind of a span, with OTLP's numbers."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class FinishedRequest(Protocol):
    """The facts about a request that gateway and engine keep; `sampling` is `None` where it was refused before
    parsing."""

    @property
    def route(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def request_id(self) -> str: ...
    @property
    def error_code(self) -> str | None: ...
    @property
    def tenant(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def response_id(self) -> str: ...
    @property
    def finish_reasons(self) -> Collection[str]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def stream(self) -> bool: ...
    @property
    def num_choices(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams | None: ...
    @property
    def ttft_s(self) -> float | None: ...


def of_request(request: FinishedRequest, method: str) -> Iterator[Attribute]:
    """Yield the attributes of a server's span."""
    yield "http.request.method", method
    yield "http.route", request.route
    yield "http.response.status_code", request.status
    yield "pagemill.request_id", request.request_id
    if request.error_code:
        yield "error.type", request.error_code
    if request.tenant:
        yield "pagemill.tenant", request.tenant
    sampling = request.sampling
    if sampling is None:
        return
    yield from of_model(request)
    if request.ttft_s is not None:
        yield "pagemill.ttft_ms", round(request.ttft_s * 1000, 3)
    yield "gen_ai.response.model", request.model
    yield "gen_ai.response.id", request.response_id
    yield "gen_ai.response.finish_reasons", sorted(request.finish_reasons)
    yield "gen_ai.usage.input_tokens", request.prompt_tokens
    yield "gen_ai.usage.output_tokens", request.output_tokens
    yield "gen_ai.usage.cache_read.input_tokens", request.usage.cached_tokens
    yield "gen_ai.request.stream", request.stream
    yield "gen_ai.request.choice.count", request.num_choices
    yield "gen_ai.request.temperature", sampling.temperature
    yield "gen_ai.request.top_p", sampling.top_p
    yield "gen_ai.request.top_k", sampling.top_k
    if sampling.max_tokens is not None:
        yield "gen_ai.request.max_tokens", sampling.max_tokens
    if sampling.seed is not None:
        yield "gen_ai.request.seed", sampling.seed


def of_model(request: FinishedRequest) -> Iterator[Attribute]:
    yield "gen_ai.operation.name", request.operation
    yield "gen_ai.provider.name", PROVIDER
    yield "gen_ai.request.model", request.model


def engine_phases(
    start_s: float, queue_s: float, first_token_s: float | None, end_s: float
) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of an engine's phases; nothing before the first token, when they are unknown."""
    if first_token_s is None:
        return
    scheduled_s = min(start_s + queue_s, first_token_s)
    yield "queue", start_s, scheduled_s
    yield "prefill", scheduled_s, first_token_s
    yield "decode", first_token_s, end_s
