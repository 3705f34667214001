"""Pooling: models that return a vector or scores of a whole prompt, and the parameters of requests to them.

`PoolingSpec` is a property of a model, read from its files (`pagemill_models.spec.pooling_files`); gateways receive it
with the tokenizer. `PoolingParams` travels with a request. Nothing is computed here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pagemill_protocol.errors import PagemillError, invalid_field

PoolingTask = Literal["embed", "score"]
"""`embed`: the vector of a text. `score`: scores of a pair of texts, or of one text, by a classifier."""
PoolingMethod = Literal["cls", "mean", "last", "max", "mean_sqrt_len", "weighted_mean"]
"""How hidden states of a prompt's tokens are pooled: the first, their mean, the last, the largest of each value, their
sum divided by the square root of their number, their mean weighted by their places from 1 on."""
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""How two vectors are compared; distances are negated."""

_ROUTES = {"embed": "/v1/embeddings, /v1/score or /v1/rerank", "score": "/v1/score or /v1/rerank"}
_TASK_TEXTS = {"embed": "computes embeddings", "score": "scores pairs of texts"}


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pooling that a request asks for."""

    task: PoolingTask = "embed"
    dimensions: int | None = None
    """Number of leading values of the vector to return; `None`: all."""
    second_segment: int = 0
    """Index of the token with which the second text of a pair begins; 0: the model does not distinguish them."""


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The pooling that a model computes."""

    task: PoolingTask
    method: PoolingMethod
    size: int
    """Number of values of a vector, or of labels of a classifier."""
    whole_prompts: bool = False
    """Attention is bidirectional: a prompt must be computed in one step, and its KV blocks are not kept."""
    normalized: bool = False
    """Vectors have the length 1."""
    sigmoid: bool = False
    """Scores lie between 0 and 1."""
    dimensions: list[int] | None = None
    """Sizes to which a vector may be truncated (Matryoshka representations, arXiv 2205.13147); empty: any; `None`:
    none."""
    default_dimensions: int | None = None
    """Number of leading values of a vector whose request names none; `None`: all. As in sentence-transformers, they
    have no length of 1 then."""
    similarity: Similarity = "cosine"
    prompts: dict[str, str] = {}
    """Prompt texts that are prepended to a text, by the name of their purpose."""
    default_prompt: str = ""
    """Prompt text that is prepended to texts whose request names no prompt."""
    lower_case: bool = False

    @property
    def reads_all(self) -> bool:
        """Whether every token of a prompt must be computed even if a prefix cache has it."""
        return self.method != "last"


def check_task(wanted: PoolingParams | None, model: PoolingSpec | None) -> None:
    """Raise `PagemillError` (400) where a model does not support the requested task. `None`: text generation."""
    if model is None:
        if wanted is not None:
            raise _unsupported(
                "This model generates text and computes no embeddings and no scores. Ask a model that does."
            )
        return
    if wanted is None:
        raise _unsupported(
            f"This model {_TASK_TEXTS[model.task]} and generates no text. Send texts to {_ROUTES[model.task]}, or ask "
            "a model that generates."
        )
    if wanted.task != model.task:
        raise _unsupported(f"This model {_TASK_TEXTS[model.task]}. Send texts to {_ROUTES[model.task]}.")
    if wanted.dimensions is not None:
        _check_dimensions(wanted.dimensions, model)


def _check_dimensions(dimensions: int, model: PoolingSpec) -> None:
    if model.dimensions is None:
        raise invalid_field(
            "dimensions",
            f"`dimensions` {dimensions} is not supported: this model was not trained for shorter vectors (config.json "
            "has no `matryoshka_dimensions` and no `is_matryoshka`). Remove it.",
            code="unsupported_parameter",
        )
    if not 1 <= dimensions <= model.size or (model.dimensions and dimensions not in model.dimensions):
        allowed = f"one of {', '.join(map(str, model.dimensions))}" if model.dimensions else f"from 1 to {model.size}"
        raise invalid_field("dimensions", f"`dimensions` must be {allowed} for this model, got {dimensions}.")


def _unsupported(message: str) -> PagemillError:
    return invalid_field("model", message, code="unsupported_by_model")
