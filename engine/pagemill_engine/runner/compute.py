"""Which type a CPU computes in, which kernels compute, how keys and values are kept: decided before anything loads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagemill_engine.config import EngineConfig
from pagemill_engine.loading.errors import LoadError
from pagemill_kernels.kv_store.storage import TORCH_TYPES
from pagemill_kernels.registry import Backend, Ops, cpu_backend, ops_for
from pagemill_protocol.model_spec import ModelSpec


class Compute(NamedTuple):
    dtype: torch.dtype
    kv_dtype: torch.dtype
    ops: Ops
    how: str
    """What runs and why, for people."""
    gathers: bool
    """Attention copies keys and values together; the native kernels read them where they lie."""


def choose_compute(config: EngineConfig, spec: ModelSpec) -> Compute:
    """By the settings; where they leave it open, what is fastest here.

    Raises `LoadError` where settings ask for what only the native kernels do and these cannot run.
    """
    dtype = _dtype(config, spec)
    backend, how = _backend(dtype, config, spec)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else TORCH_TYPES[config.kv_cache_dtype]
    if backend != "cpu_native" and kv_dtype != dtype:
        raise _needs_native("kv_cache_dtype", config.kv_cache_dtype, how, "Set kv_cache_dtype to auto")
    if backend != "cpu_native" and config.deterministic:
        raise _needs_native("deterministic", "true", how, "Turn deterministic off")
    return Compute(dtype, kv_dtype, ops_for(backend, config.deterministic), how, backend != "cpu_native")


def _dtype(config: EngineConfig, spec: ModelSpec) -> torch.dtype:
    if config.dtype != "auto":
        return TORCH_TYPES[config.dtype]
    other_cache = config.kv_cache_dtype in ("float32", "int8")
    wants_native = config.quantization != "none" or other_cache or config.deterministic
    if wants_native and _backend(torch.float32, config, spec)[0] == "cpu_native":
        return torch.float32
    bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if bfloat16 else torch.float32


def _backend(dtype: torch.dtype, config: EngineConfig, spec: ModelSpec) -> tuple[Backend, str]:
    return cpu_backend(dtype, spec.head_dim, config.block_size, spec.num_heads // spec.num_kv_heads)


def _needs_native(field: str, value: str, how: str, remedy: str) -> LoadError:
    message = f"`{field}` {value} needs the native kernels, but this model would run on {how}. {remedy}"
    return LoadError("SettingsUnsupported", f"{message}, or set dtype to float32 or auto where that is the cause.")
