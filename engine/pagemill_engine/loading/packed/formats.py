"""The packed formats by the method that `quantization_config` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pagemill_engine.loading.packed import awq, bitsandbytes, compressed_tensors, fp8, gptq
from pagemill_engine.loading.packed.matrix import PackedMatrix, Settings, Stored


class Format(NamedTuple):
    matrices: Callable[[Settings, Stored], dict[str, PackedMatrix]]
    """By their names without packing. Raises `LoadError`."""
    details: Callable[[Settings], list[str]]
    """What the settings say, in words."""


FORMATS: Mapping[str, Format] = {
    "awq": Format(awq.matrices, awq.details),
    "gptq": Format(gptq.matrices, gptq.details),
    "fp8": Format(fp8.matrices, fp8.details),
    "compressed-tensors": Format(compressed_tensors.matrices, compressed_tensors.details),
    "bitsandbytes": Format(bitsandbytes.matrices, bitsandbytes.details),
}
"""A new format is one file and one line."""


def in_words(settings: Settings) -> str:
    """What a folder holds, as its settings say it."""
    method = str(settings.get("quant_method"))
    found = FORMATS.get(method)
    details = [] if found is None else found.details(settings)
    return f"{method} ({', '.join(details)})" if details else method
