"""Base class of OpenAI's two generating dialects: error shape, `[DONE]`, usage, merged answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagemill_api.dialects.base import Dialect
from pagemill_api.dialects.transport import SSE
from pagemill_api.openai import render
from pagemill_protocol.errors import PagemillError, error_body
from pagemill_protocol.ids import new_id
from pagemill_protocol.request.generate import GenerateRequest, Usage


class OpenAIDialect(Dialect):
    transport = SSE
    id_prefix: str
    chunk_object: str

    def new_request_id(self) -> str:
        return f"{self.id_prefix}-{new_id()}"

    def error_body(self, error: PagemillError) -> bytes:
        return error_body(error)

    def error_event(self, error: PagemillError) -> bytes:
        return render.sse_error(error)

    def merged_end(self, request: GenerateRequest, usage: Usage) -> bytes:
        return stream_end(render.head(request), self.chunk_object, usage if request.include_usage else None)

    def merge_bodies(self, bodies: Sequence[bytes]) -> Iterator[bytes]:
        return render.merge_completion_bodies(bodies)


def stream_end(head: render.Head, chunk_object: str, usage: Usage | None) -> bytes:
    """Return the usage event, if there is one, and `[DONE]`."""
    if usage is None:
        return render.SSE_DONE
    return render.sse(render.usage_chunk(head, chunk_object, usage)) + render.SSE_DONE
