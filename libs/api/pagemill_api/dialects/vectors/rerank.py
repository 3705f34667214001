"""Ranking of documents by a query (`POST /v1/rerank`), in the shape of Jina, Cohere and vLLM.

The score is that of a cross-encoder, which reads query and document together, or the cosine of two embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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
from pagemill_api.dialects.vectors.request import RerankRequest
from pagemill_api.dialects.vectors.texts import TextEncoder
from pagemill_api.openai.parse import parse_body
from pagemill_protocol.request.pooling import PoolingParams, PoolingSpec

_QUERY, _DOCUMENT = ("query",), ("document", "passage")
"""Names of a model's prompts that sentence-transformers uses for search."""


class RerankDialect(VectorDialect):
    name = "rerank"
    path = "/v1/rerank"
    alias_paths = ("/rerank", "/v2/rerank")
    prompt_field = "documents"
    id_prefix = "rerank"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> RerankBody:
        return RerankBody(parse_body(raw, RerankRequest), self)

    def finish(self, parts: Sequence[Part]) -> Iterator[bytes]:
        first = parts[0]
        documents, scores = _scored(parts)
        results: list[dict[str, Any]] = []
        for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: first.fields.get("top_n")]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if "document" in documents[index].fields:
                result["document"] = {"text": documents[index].fields["document"]}
            results.append(result)
        yield orjson.dumps({"id": first.id, "model": first.model, "usage": usage_of(parts), "results": results})


class RerankBody(VectorBody):
    def __init__(self, request: RerankRequest, dialect: RerankDialect) -> None:
        super().__init__(request, dialect)
        self._ranking = request
        self._embeds = False

    def prompt_texts(self, max_chars: int) -> list[str]:
        query, documents = self._ranking.query[:max_chars], self._ranking.documents
        if self._embeds:
            return [query, *(document[:max_chars] for document in documents)]
        return [query] * len(documents)

    def parts(self, encoder: TextEncoder, spec: PoolingSpec) -> list[PartRequest]:
        query, documents = self._ranking.query, self._ranking.documents
        names = [f"documents[{index}]" for index in range(len(documents))]
        self._embeds = spec.task == "embed"
        if not self._embeds:
            pairs = [encoder.pair(query, each, name) for each, name in zip(documents, names, strict=True)]
            scored = [(pair.token_ids, PoolingParams("score", None, pair.second_segment)) for pair in pairs]
            return [
                PartRequest(token_ids, params, self._fields(document))
                for (token_ids, params), document in zip(scored, documents, strict=True)
            ]
        params, before = PoolingParams("embed"), _prompt(encoder, spec, _DOCUMENT)
        asked = encoder.text(query, "query", _prompt(encoder, spec, _QUERY))
        return [
            PartRequest(asked, params, {"query": True, "how": spec.similarity, **self._fields(None)}),
            *(
                PartRequest(encoder.text(each, name, before), params, self._fields(each))
                for each, name in zip(documents, names, strict=True)
            ),
        ]

    def _fields(self, document: str | None) -> dict[str, Any]:
        shown = {"document": document} if document is not None and self._ranking.return_documents else {}
        top_n = self._ranking.top_n
        return shown if top_n is None else {**shown, "top_n": top_n}


def _prompt(encoder: TextEncoder, spec: PoolingSpec, names: Sequence[str]) -> str:
    return encoder.prompt(next((name for name in names if name in spec.prompts), None))


def _scored(parts: Sequence[Part]) -> tuple[Sequence[Part], list[float]]:
    """Return the documents' parts and their scores."""
    if not parts[0].fields.get("query"):
        return parts, [float(part.vector[0]) for part in parts]
    documents = parts[1:]
    return documents, similarities(parts[0].vector, [part.vector for part in documents], parts[0].fields["how"])
