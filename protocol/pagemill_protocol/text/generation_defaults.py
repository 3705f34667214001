"""Sampling values for requests that send none: a model's own, from its generation_config.json, and its owner's.

An engine resolves them once and hands them out in its tokenizer bundle, so that it and every gateway prepare requests
alike (`openai.prepare`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.sampling import SamplingParams
from pagemill_protocol.text.bundle import TokenizerBundle

GenerationConfig = Literal["auto", "vllm"]
"""`auto`: the model's own values count; `vllm`: they do not."""


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an owner sets, by name of `SamplingParams`; `None`: as the model has it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    @property
    def values(self) -> dict[str, float]:
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in given.items() if value is not None}


_KEYS = {name: name for name in GenerationDefaults.__struct_fields__ if name != "max_tokens"} | {
    "max_new_tokens": "max_tokens"
}


def values_of_model(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json says of them, not checked. As in vLLM, `do_sample` does not count."""
    return {name: value for key, name in _KEYS.items() if (value := generation_config.get(key)) is not None}


def with_defaults(
    bundle: TokenizerBundle, generation_config: GenerationConfig, own: GenerationDefaults | None
) -> TokenizerBundle:
    """`bundle` with the values that requests get. Raises `PagemillError` for one that cannot be used."""
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
