"""Which type a CPU computes in and which kernels compute: decided once, before anything is loaded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagemill_engine.config import EngineConfig
from pagemill_kernels.registry import Backend, cpu_backend
from pagemill_protocol.model_spec import ModelSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Compute(NamedTuple):
    dtype: torch.dtype
    backend: Backend
    how: str
    """What runs and why, for people."""


def choose_compute(config: EngineConfig, spec: ModelSpec) -> Compute:
    """By the settings; where they leave it open, what is fastest here."""
    if config.dtype != "auto":
        return _with_backend(_DTYPES[config.dtype], config, spec)
    if config.quantization != "none":
        native = _with_backend(torch.float32, config, spec)
        if native.backend == "cpu_native":
            return native
    bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return _with_backend(torch.bfloat16 if bfloat16 else torch.float32, config, spec)


def _with_backend(dtype: torch.dtype, config: EngineConfig, spec: ModelSpec) -> Compute:
    heads_per_kv_head = spec.num_heads // spec.num_kv_heads
    return Compute(dtype, *cpu_backend(dtype, spec.head_dim, config.block_size, heads_per_kv_head))
