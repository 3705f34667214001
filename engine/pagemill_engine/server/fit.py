"""Checks from a model's headers whether it fits into the container's memory, before anything large is loaded.

The kernel kills a process that loads too much without any message. The estimate is a lower bound, so it refuses nothing
that would run; the engine process computes the exact sizes once it knows the device.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.failure import StartupError
from pagemill_execution.sizing.kv_sizes import cache_kinds, kv_bytes_per_token, max_model_len_for
from pagemill_execution.sizing.memory import memory_limit
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_models.sources import resolve_source
from pagemill_models.spec.heads import eagle3_head, stored_mtp_heads
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec

RUNTIME_BYTES = 256 * 1024**2
"""Memory of both processes without a model; a low estimate."""
NVIDIA_DRIVER = Path("/dev/nvidiactl")
"""Exists, in containers too, where an NVIDIA device can be used."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CODE_BITS = {"int8": 8, "int4": 4, "w8a8": 8, "fp8": 8}


def check_fits(config: EngineConfig, spec: ModelSpec, path: Path) -> None:
    """Raise `StartupError` if the model needs more memory than the container has."""
    if config.device == "cuda" or (config.device == "auto" and NVIDIA_DRIVER.exists()):
        return  # Weights and cache go to the device's own memory, layer by layer.
    limit, weights, token_bytes = (
        memory_limit(),
        _weight_bytes(config, spec),
        kv_bytes_per_token(spec, _kv_type(config)),
    )
    whose = "its weights"
    for draft in _draft_specs(config, spec, path):
        whose = "its weights and those of what drafts"
        weights += _weight_bytes(msgspec.structs.replace(config, quantization="none"), draft)
        token_bytes += kv_bytes_per_token(draft, _kv_type(config))
    kv_cache = _kv_cache_bytes(config, token_bytes)
    if kv_cache:
        _check_longest(config, spec, kv_cache // max(1, config.block_size * token_bytes))
    if weights + RUNTIME_BYTES > limit:
        raise StartupError(
            "ModelTooLarge",
            f"`model` {config.model!r} needs at least {_size(weights)} for {whose} and {_size(RUNTIME_BYTES)} to "
            f"run, but the memory limit is {_size(limit)}. Raise resources.memory, or use a smaller or more strongly "
            "quantized model.",
            "model",
        )
    if weights + RUNTIME_BYTES + kv_cache > limit:
        raise StartupError(
            "KVCacheTooLarge",
            f"The KV cache of {_size(kv_cache)} does not fit: the weights need {_size(weights)}, the engine "
            f"{_size(RUNTIME_BYTES)}, and the memory limit is {_size(limit)}. Lower kvCacheMemory or raise "
            "resources.memory.",
            "kv_cache_memory_bytes",
        )


def _weight_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the bytes that the weights take in memory.

    Quantized weights are loaded as they are, and so is bfloat16 where float32 is asked for. Other weights are converted
    to the configured type.
    """
    if config.quantization != "none":
        return min(spec.weight_bytes, spec.num_parameters * _CODE_BITS[config.quantization] // 8)
    if spec.quantization is not None:
        return spec.weight_bytes
    item_bytes = _ITEM_BYTES.get(config.dtype)
    if item_bytes is None or (spec.dtype == "bfloat16" and config.dtype == "float32"):
        return spec.weight_bytes
    return spec.num_parameters * item_bytes


def _draft_specs(config: EngineConfig, spec: ModelSpec, path: Path) -> list[ModelSpec]:
    """Return what drafts by the settings. Whether it fits the model is decided by `pagemill_execution.sizing.draft`.

    Raises `SourceError`.
    """
    method, source = config.speculative.method, config.speculative.source
    if source is not None:
        path = resolve_source(source, field="speculative.source")
        return [eagle3_head(path) if method == "eagle3" else load_model_spec(path)]
    if method == "auto" and config.pipeline_parallel_size > 1:
        return []
    return stored_mtp_heads(spec, path, whole=method == "auto") if method in ("auto", "mtp") else []


def _kv_cache_bytes(config: EngineConfig, token_bytes: int) -> int:
    """Return the bytes of the KV cache that the settings ask for; 0 if the cache takes the memory that is left."""
    if config.num_kv_blocks is None:
        return config.kv_cache_memory_bytes or 0
    return config.num_kv_blocks * config.block_size * token_bytes


def _check_longest(config: EngineConfig, spec: ModelSpec, num_blocks: int) -> None:
    """Raise `StartupError` if a request of `max_model_len` tokens does not fit into a cache of so many blocks."""
    try:
        max_model_len_for(config, spec, cache_kinds(config, spec, _kv_type(config), num_blocks), shares_memory=True)
    except LoadError as error:
        raise StartupError(error.reason, error.message, "max_model_len") from None


def _kv_type(config: EngineConfig) -> KVType:
    """Return the type of the cache, or one that takes no more if the device decides."""
    name = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return "bfloat16" if name == "auto" else name


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.1f} GiB" if num_bytes >= 1024**3 else f"{num_bytes / 1024**2:.0f} MiB"
