"""vLLM's scores of pairs of texts (`POST /v1/score`): by a cross-encoder, or the similarity of two embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import orjson

from pagemill_api.dialects.transport import NO_REQUEST, RequestInfo
from pagemill_api.dialects.vectors.parts import (
    Part,
    PartRequest,
    VectorBody,
    VectorDialect,
    similarities,
    usage_of,
)
from pagemill_api.dialects.vectors.request import ScoreRequest
from pagemill_api.dialects.vectors.texts import TextEncoder
from pagemill_api.openai.parse import parse_body
from pagemill_protocol.request.pooling import PoolingParams, PoolingSpec


class ScoreDialect(VectorDialect):
    name = "score"
    path = "/v1/score"
    alias_paths = ("/score",)
    prompt_field = "text_2"
    id_prefix = "score"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> ScoreBody:
        return ScoreBody(parse_body(raw, ScoreRequest), self)

    def finish(self, parts: Sequence[Part]) -> Iterator[bytes]:
        first = parts[0]
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(_scores(parts))]
        yield orjson.dumps(
            {
                "id": first.id,
                "object": "list",
                "created": first.created,
                "model": first.model,
                "data": data,
                "usage": usage_of(parts),
            }
        )


class ScoreBody(VectorBody):
    def __init__(self, request: ScoreRequest, dialect: ScoreDialect) -> None:
        super().__init__(request, dialect)
        self._pairs = request
        self._embeds = False

    def prompt_texts(self, max_chars: int) -> list[str]:
        firsts = [text[:max_chars] for text in self._pairs.text_1]
        seconds = [text[:max_chars] for text in self._pairs.text_2]
        return [*firsts, *seconds] if self._embeds else firsts * (len(seconds) // len(firsts))

    def parts(self, encoder: TextEncoder, spec: PoolingSpec) -> list[PartRequest]:
        firsts, seconds = self._pairs.text_1, self._pairs.text_2
        self._embeds = spec.task == "embed"
        if self._embeds:
            before, params = encoder.prompt(None), PoolingParams("embed")
            sides = [("text_1", text) for text in firsts] + [("text_2", text) for text in seconds]
            fields = {"how": spec.similarity}
            return [
                PartRequest(encoder.text(text, side, before), params, {"side": side, **fields}) for side, text in sides
            ]
        pairs = zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)
        found = [encoder.pair(first, second, "text_2") for first, second in pairs]
        return [PartRequest(each.token_ids, PoolingParams("score", None, each.second_segment)) for each in found]


def _scores(parts: Sequence[Part]) -> list[float]:
    firsts = [part.vector for part in parts if part.fields.get("side") == "text_1"]
    if not firsts:
        return [float(part.vector[0]) for part in parts]
    seconds, how = [part.vector for part in parts[len(firsts) :]], parts[0].fields["how"]
    if len(firsts) == 1:
        return similarities(firsts[0], seconds, how)
    return [similarities(first, [second], how)[0] for first, second in zip(firsts, seconds, strict=True)]
