"""OpenAI's embeddings (`POST /v1/embeddings`): texts or token ids, vectors as numbers or base64."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

import orjson

from pagemill_api.dialects.transport import NO_REQUEST, RequestInfo
from pagemill_api.dialects.vectors.parts import Part, PartRequest, VectorBody, VectorDialect, usage_of
from pagemill_api.dialects.vectors.request import EmbeddingRequest
from pagemill_api.dialects.vectors.texts import TextEncoder
from pagemill_api.openai.parse import parse_body
from pagemill_protocol.request.pooling import PoolingParams, PoolingSpec


class EmbeddingsDialect(VectorDialect):
    name = "embeddings"
    path = "/v1/embeddings"
    prompt_field = "input"
    id_prefix = "embd"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> EmbeddingsBody:
        return EmbeddingsBody(parse_body(raw, EmbeddingRequest), self)

    def finish(self, parts: Sequence[Part]) -> Iterator[bytes]:
        first = parts[0]
        as_text = first.fields["encoding_format"] == "base64"
        answer = {
            "id": first.id,
            "object": "list",
            "created": first.created,
            "model": first.model,
            "data": orjson.Fragment(b"\0"),
            "usage": usage_of(parts),
        }
        before, _, after = orjson.dumps(answer).partition(b"\0")
        yield before
        for index, part in enumerate(parts):
            row = {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(part.values).decode() if as_text else part.vector,
            }
            yield (b"," if index else b"[") + orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
        yield b"]" + after


class EmbeddingsBody(VectorBody):
    def __init__(self, request: EmbeddingRequest, dialect: EmbeddingsDialect) -> None:
        super().__init__(request, dialect)
        self._embedding = request

    def prompt_texts(self, max_chars: int) -> list[str]:
        inputs = (each[:max_chars] for each in self._embedding.input)
        return [each if isinstance(each, str) else repr(each) for each in inputs]

    def pooling_params(self, model: PoolingSpec | None) -> PoolingParams:
        return PoolingParams("embed", self._embedding.dimensions)

    def parts(self, encoder: TextEncoder, spec: PoolingSpec) -> list[PartRequest]:
        request, params = self._embedding, self.pooling_params(spec)
        before = encoder.prompt(request.prompt_name)
        fields = {"encoding_format": request.encoding_format}
        several = len(request.input) > 1
        return [
            PartRequest(encoder.text(each, f"input[{index}]" if several else "input", before), params, fields)
            for index, each in enumerate(request.input)
        ]
