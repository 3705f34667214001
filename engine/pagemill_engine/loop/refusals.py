"""Outputs of requests that end before they have a sequence."""

from __future__ import annotations

from collections.abc import Iterator

from pagemill_engine.ipc.messages import TokensOut
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest


def refusals(request: GenerateRequest, error: PagemillError) -> list[TokensOut]:
    """Return outputs that end every choice with `error`."""
    return [
        TokensOut(
            request_id=request.request_id,
            choice=choice,
            finish_reason="error",
            error=error.message,
            error_status=error.status,
            error_type=error.type,
            error_param=error.param,
            error_code=error.code,
            error_retry_after_s=error.retry_after_s,
        )
        for choice in _choices(request)
    ]


def aborts(request: GenerateRequest) -> list[TokensOut]:
    return [
        TokensOut(request_id=request.request_id, choice=choice, finish_reason="abort") for choice in _choices(request)
    ]


def _choices(request: GenerateRequest) -> Iterator[int]:
    num_choices = max(1, request.sampling.num_reported)
    first = request.prompt_index * num_choices
    yield from range(first, first + num_choices)
