"""Sampling values for requests that send none, as the owner of a deployment may set them."""

from __future__ import annotations

from typing import Literal

import msgspec

GenerationConfig = Literal["auto", "vllm"]
"""`auto`: values of the model's generation_config.json apply; `vllm`: they do not."""


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Values by name of `SamplingParams`; `None`: the model's own value applies."""

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
