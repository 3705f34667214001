"""The packed formats by the method that `quantization_config` names, and the width of their integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagemill_engine.loading.packed import awq, bitsandbytes, compressed_tensors, fp8, gptq
from pagemill_engine.loading.packed.matrix import PackedMatrix, Settings, Stored

FORMATS: Mapping[str, Callable[[Settings, Stored], dict[str, PackedMatrix]]] = {
    "awq": awq.matrices,
    "gptq": gptq.matrices,
    "fp8": fp8.matrices,
    "compressed-tensors": compressed_tensors.matrices,
    "bitsandbytes": bitsandbytes.matrices,
}
"""A new format is one file and one line."""
