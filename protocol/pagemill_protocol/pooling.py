"""Pooling: what a model makes of a whole prompt in place of further tokens, and what a request may ask of it.

`PoolingSpec` is a fact of a model, read from its files (`models.pooling_files`); gateways get it with the tokenizer.
`PoolingParams` travels with a request. Nothing here computes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pagemill_protocol.errors import PagemillError, invalid_field

PoolingTask = Literal["embed", "score"]
"""`embed`: a vector of a text. `score`: numbers of a pair of texts, or of one text, by a classifier."""
PoolingMethod = Literal["cls", "mean", "last"]
"""Of the hidden states of a prompt's tokens: the first, their mean, the last."""

_ROUTES = {"embed": "/v1/embeddings, /v1/score or /v1/rerank", "score": "/v1/score or /v1/rerank"}
_WHAT = {"embed": "computes embeddings", "score": "scores pairs of texts"}


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request wants of a model that pools."""

    task: PoolingTask = "embed"
    dimensions: int | None = None
    """Leading values of the vector; `None`: all."""
    second_segment: int = 0
    """Index of the token with which the second text of a pair begins; 0: the model does not distinguish them."""


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model that pools makes of a prompt."""

    task: PoolingTask
    method: PoolingMethod
    size: int
    """Values of a vector, or labels of a classifier."""
    whole_prompts: bool = False
    """Tokens attend to those behind them too: a prompt is computed in one step, and nothing of it is kept."""
    normalized: bool = False
    """Vectors have the length 1."""
    sigmoid: bool = False
    """Scores lie between 0 and 1."""
    dimensions: list[int] | None = None
    """Sizes to which a vector may be cut (Matryoshka representations, arXiv 2205.13147); empty: any; `None`: none."""
    prompts: dict[str, str] = {}
    """Texts that go before a text, by the name of its purpose."""
    default_prompt: str = ""
    """Goes before texts whose request names none."""
    lower_case: bool = False

    @property
    def reads_all(self) -> bool:
        """Every token of a prompt must be computed, whatever a prefix cache holds."""
        return self.method != "last"


def check_task(wanted: PoolingParams | None, model: PoolingSpec | None) -> None:
    """Raise `PagemillError` (400) where a model does not do what a request asks for. `None`: it generates."""
    if model is None:
        if wanted is not None:
            raise _cannot("This model generates text and computes no embeddings and no scores. Ask a model that does.")
        return
    if wanted is None:
        raise _cannot(
            f"This model {_WHAT[model.task]} and generates no text. Send texts to {_ROUTES[model.task]}, or ask a "
            "model that generates."
        )
    if wanted.task != model.task:
        raise _cannot(f"This model {_WHAT[model.task]}. Send texts to {_ROUTES[model.task]}.")
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


def _cannot(message: str) -> PagemillError:
    return invalid_field("model", message, code="unsupported_by_model")
