"""The packed formats by the method that `quantization_config` names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from pagemill_engine.loading.codes import CodeKind
from pagemill_engine.loading.packed import awq, bitsandbytes, compressed_tensors, fp8, gptq
from pagemill_engine.loading.packed.matrix import PackedMatrix, Settings, Stored


class Format(Protocol):
    """A module of this folder."""

    def matrices(self, settings: Settings, stored: Stored) -> dict[str, PackedMatrix]:
        """By their names without packing. Raises `LoadError`."""
        ...

    def details(self, settings: Settings) -> list[str]:
        """What the settings say, in words."""
        ...

    def is_packed(self, settings: Settings, names: Collection[str], base: str) -> bool:
        """Whether `base`.weight is packed, by the names of the stored tensors alone."""
        ...

    def kind(self, settings: Settings, names: Collection[str], base: str, shape: tuple[int, int]) -> CodeKind | None:
        """What it is in memory if so, as `PackedMatrix.kind`. `shape`: [out, in]"""
        ...


FORMATS: Mapping[str, Format] = {
    "awq": awq,
    "gptq": gptq,
    "fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
}
"""A new format is one file and one line."""


def in_words(settings: Settings) -> str:
    """What a folder holds, as its settings say it."""
    method = str(settings.get("quant_method"))
    found = FORMATS.get(method)
    details = [] if found is None else found.details(settings)
    return f"{method} ({', '.join(details)})" if details else method
