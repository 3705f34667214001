"""Translation of vLLM's `speculative_config` to the engine's setting, for `LLM(...)` and `pagemill serve`.

vLLM's methods that find n-grams become `ngram`, its `draft_model` becomes `draft`, its names of layers for multi-token
prediction `mtp`. Other methods are refused, as is every key that this version does not know. `vllm_arguments` has all
other arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from pagemill_execution.config import MOST_PROPOSED, PROPOSER_GROUP, SpeculationConfig
from pagemill_protocol.errors import show_python

NAME = "speculative_config"
_METHODS = {"ngram": "ngram", "[ngram]": "ngram", "ngram_gpu": "ngram", "suffix": "ngram", "auto": "auto", "off": "off"}
_METHODS |= dict.fromkeys(("mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "minimax_m2_mtp"), "mtp")
_WITH_MODEL = {"draft_model": "draft", "draft": "draft", "eagle3": "eagle3"}
_WITHOUT_EFFECT = (
    "prompt_lookup_max",
    "prompt_lookup_min",
    "disable_by_batch_size",
    "disable_padded_drafter_batch",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "use_local_argmax_reduction",
)
"""How far n-grams reach and when they are worth it is learned from what is sampled."""
_REMEDY = "Use ngram, draft_model, eagle3, mtp, auto or off."


def speculative_of(given: Any) -> SpeculationConfig:
    """Return the setting for vLLM's configuration. Raises `ValueError` that names the key, its value and the remedy."""
    if isinstance(given, SpeculationConfig):
        return given
    if given is None:
        return SpeculationConfig()
    if not isinstance(given, Mapping):
        raise ValueError(f"{NAME} must be an object such as {{'method': 'ngram'}}, got {show_python(given)}.")
    keys = {key: value for key, value in given.items() if value is not None}
    method, source = _method_of(keys)
    num_tokens = _count(keys, "num_speculative_tokens", MOST_PROPOSED)
    longest, shortest = _count(keys, "prompt_lookup_max"), _count(keys, "prompt_lookup_min")
    if longest is not None and shortest is not None and shortest > longest:
        raise ValueError(
            f"{NAME}: prompt_lookup_min={shortest} is above prompt_lookup_max={longest}. Lower it, or leave both out."
        )
    for key in keys:
        if key not in ("method", "model", "num_speculative_tokens", *_WITHOUT_EFFECT):
            raise ValueError(f"{NAME}: {key} is not supported. Remove it.")
    return SpeculationConfig(method=method, source=source, **({} if num_tokens is None else {"num_tokens": num_tokens}))


def _method_of(keys: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Return the engine's method and the source of its model. vLLM's `model` may name a method, and alone is a draft
    model."""
    method, model = keys.get("method"), keys.get("model")
    if model is not None and not isinstance(model, str):
        raise ValueError(f"{NAME}: model must be a text, got {show_python(model)}.")
    if method is None:
        method = "auto" if model is None else model if model in _METHODS else "draft_model"
    if isinstance(method, str) and method in entry_points(group=PROPOSER_GROUP).names:
        return method, None
    if not isinstance(method, str) or method not in _METHODS | _WITH_MODEL:
        raise ValueError(f"{NAME}: method {show_python(method)} is not supported. {_REMEDY}")
    if method in _WITH_MODEL:
        if model is None:
            raise ValueError(f"{NAME}: method {method} needs what drafts. Name it by `model`.")
        return _WITH_MODEL[method], model
    if model is not None and model not in _METHODS:
        raise ValueError(f"{NAME}: model={show_python(model)}: method {method} takes no model. Remove it.")
    return _METHODS[method], None


def _count(keys: Mapping[str, Any], key: str, most: int | None = None) -> int | None:
    value = keys.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (most is not None and value > most):
        bound = "at least 1" if most is None else f"1 to {most}"
        raise ValueError(f"{NAME}: {key} must be a whole number of {bound}, got {show_python(value)}.")
    return value
