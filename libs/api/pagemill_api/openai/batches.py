"""Body of `POST /v1/batches`. The gateway, which alone runs batches, checks the contents of the input file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pagemill_api.openai.fields import Name, RequestModel


class BatchRequest(RequestModel):
    input_file_id: Name
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"]
    completion_window: Annotated[str, Field(max_length=16)]
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
