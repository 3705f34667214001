"""The packed formats by the method in `quantization_config`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from pagemill_engine.weights.codes import CodeKind
from pagemill_engine.weights.packed import awq, bitsandbytes, compressed_tensors, fp8, gptq
from pagemill_engine.weights.packed.matrix import PackedMatrix, Settings, Stored


class Format(Protocol):
    """The interface of this package's format modules."""

    def matrices(self, settings: Settings, stored: Stored) -> dict[str, PackedMatrix]:
        """Return the packed matrices by weight name. Raises `LoadError`."""
        ...

    def details(self, settings: Settings) -> list[str]:
        """Return a description of the settings, in words."""
        ...

    def is_packed(self, settings: Settings, names: Collection[str], base: str) -> bool:
        """Whether `base`.weight is packed, judged by the names of the stored tensors alone."""
        ...

    def kind(self, settings: Settings, names: Collection[str], base: str, shape: tuple[int, int]) -> CodeKind | None:
        """Return the form of a packed matrix in memory, as `PackedMatrix.kind`. `shape`: [out, in]."""
        ...


FORMATS: Mapping[str, Format] = {
    "awq": awq,
    "gptq": gptq,
    "fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
}
"""To add a format, add a module and an entry here."""


def describe_format(settings: Settings) -> str:
    """Return a description of a folder's quantization by its settings."""
    method = str(settings.get("quant_method"))
    found = FORMATS.get(method)
    details = [] if found is None else found.details(settings)
    return f"{method} ({', '.join(details)})" if details else method
