"""Converts the arguments of `LLM.embed` and `LLM.score` to requests, and the vectors to results.

Texts become token ids as on a server (`dialects.vectors.texts`); `llm` runs the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_api.dialects.vectors.parts import POOLED, similarities
from pagemill_api.dialects.vectors.texts import TextEncoder
from pagemill_engine.offline import Prompt, prompts_of
from pagemill_engine.offline_prompts import PromptEncoder
from pagemill_engine.output.results import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pagemill_protocol.errors import invalid_field, show_python
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.pooling import PoolingParams, Similarity, check_task


class PooledPrompt(NamedTuple):
    token_ids: list[int]
    params: PoolingParams

    def request(self, request_id: str, model: str) -> GenerateRequest:
        return GenerateRequest(
            request_id=request_id,
            model=model,
            prompt_token_ids=self.token_ids,
            sampling=POOLED,
            pooling=self.params,
            dialect="embeddings",
        )


class PromptVector(NamedTuple):
    """The result of one `PooledPrompt`."""

    request_id: str
    token_ids: list[int]
    values: NDArray[np.float32]


def texts_to_embed(
    encoder: PromptEncoder, prompts: Prompt | Sequence[Prompt], params: Any, truncate: int | None
) -> list[PooledPrompt]:
    """Return the prompts to embed. Raises `PagemillError` that names a prompt or parameter that cannot be served."""
    if params is not None and not isinstance(params, PoolingParams):
        raise invalid_field("pooling_params", f"pooling_params must be a PoolingParams, got {show_python(params)}.")
    wanted = PoolingParams("embed", None if params is None else params.dimensions)
    texts = _encoder_of(encoder, wanted, truncate)
    before = texts.prompt(None)
    given = prompts_of(prompts)
    return [PooledPrompt(texts.text(each, f"prompts[{index}]", before), wanted) for index, each in enumerate(given)]


def pairs_to_score(encoder: PromptEncoder, first: Any, second: Any, truncate: int | None) -> list[PooledPrompt]:
    """Return a cross-encoder's pairs, or an embedding model's first texts followed by its second texts."""
    firsts, seconds = _texts(first, "data_1"), _texts(second, "data_2")
    num_firsts, num_seconds = len(firsts), len(seconds)
    if num_firsts not in (1, num_seconds):
        raise invalid_field(
            "data_2",
            f"data_1 has {num_firsts} texts and data_2 {num_seconds}. Pass one data_1, or as many as data_2.",
        )
    model = encoder.tokenizer.bundle.pooling
    texts = _encoder_of(encoder, PoolingParams("embed" if model is None else model.task), truncate)
    if model is not None and model.task == "embed":
        before, params = texts.prompt(None), PoolingParams("embed")
        sides = [("data_1", text) for text in firsts] + [("data_2", text) for text in seconds]
        return [PooledPrompt(texts.text(text, side, before), params) for side, text in sides]
    joined = zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)
    pairs = [texts.pair(one, other, "data_2") for one, other in joined]
    return [PooledPrompt(pair.token_ids, PoolingParams("score", None, pair.second_segment)) for pair in pairs]


def embedding_of(vector: PromptVector) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(vector.request_id, EmbeddingOutput(vector.values.tolist()), vector.token_ids)


def scores_of(vectors: Sequence[PromptVector], num_seconds: int, how: Similarity | None) -> list[ScoringRequestOutput]:
    """Return the scores.

    `how`: the vectors are embeddings, of all first texts, then of `num_seconds` second ones, and compared in this way.
    """
    if how is None:
        return [_score(vector, float(vector.values[0])) for vector in vectors]
    firsts, seconds = vectors[:-num_seconds], vectors[-num_seconds:]
    paired = zip(list(firsts) * (num_seconds // len(firsts)), seconds, strict=True)
    return [_score(second, similarities(first.values, [second.values], how)[0]) for first, second in paired]


def _score(vector: PromptVector, score: float) -> ScoringRequestOutput:
    return ScoringRequestOutput(vector.request_id, ScoringOutput(score), vector.token_ids)


def _encoder_of(encoder: PromptEncoder, wanted: PoolingParams, truncate: int | None) -> TextEncoder:
    spec = encoder.tokenizer.bundle.pooling
    check_task(wanted, spec)
    assert spec is not None, "refused above"
    return TextEncoder(encoder.tokenizer, spec, encoder.max_model_len, truncate)


def _texts(value: Any, field: str) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise invalid_field(field, f"{field} must be a string or a list of strings, got {show_python(value)}.")
    return texts
