"""Sampling values for requests that send none: what an owner may set."""

from __future__ import annotations

from typing import Literal

import msgspec

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
