"""Resolve the sampling values for requests that send none: the model's own, overridden by its owner's.

An engine does it once and serves them in its tokenizer bundle, so that it and every gateway prepare requests alike
(`openai.prepare`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pagemill_models.tokenizer_files.generation_defaults import GenerationConfig, GenerationDefaults
from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

_KEYS = {name: name for name in GenerationDefaults.__struct_fields__ if name != "max_tokens"} | {
    "max_new_tokens": "max_tokens"
}


def values_of_model(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in generation_config.json, unchecked. As in vLLM, `do_sample` is ignored."""
    return {name: value for key, name in _KEYS.items() if (value := generation_config.get(key)) is not None}


def with_defaults(
    bundle: TokenizerBundle, generation_config: GenerationConfig, own: GenerationDefaults | None
) -> TokenizerBundle:
    """Return `bundle` with the resolved values. Raises `PagemillError` for an invalid one."""
    of_model = bundle.sampling_defaults if generation_config == "auto" else {}
    _check(of_model, "generation_config.json of the model", "Correct the file, or set generation_config to vllm.")
    of_owner = own.values if own is not None else {}
    _check(of_owner, "generation_defaults", "Correct it.")
    return msgspec.structs.replace(bundle, sampling_defaults={**of_model, **of_owner})


def _check(values: Mapping[str, Any], source: str, remedy: str) -> None:
    try:
        SamplingParams(**values).validate()
    except PagemillError as error:
        raise invalid_field(error.param or "", f"{source}: {error.message} {remedy}") from None
