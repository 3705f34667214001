"""Computes step limits and memory of a model on an accelerator that this machine need not have.

The bytes come from the engine's own memory budget. If the model does not fit, the error names the device, the cause,
and other devices or quantizations that fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pagemill.planning.accelerators import ACCELERATORS, Accelerator
from pagemill.planning.errors import DeviceTooSmall, PlanError
from pagemill.planning.headers import Header
from pagemill_engine.config import EngineConfig
from pagemill_execution.config import ExecutionConfig
from pagemill_execution.sizing.budget import MemoryPlan, RankSizes, Sizes, plan_memory
from pagemill_execution.sizing.memory import MemoryState
from pagemill_execution.sizing.step_limits import choose_step_limits
from pagemill_execution.weights.errors import LoadError
from pagemill_models.spec.model_spec import ModelSpec

OTHER_MAKER = "for comparison of data sheets only: the engine's kernels need NVIDIA's devices, so no pod can run on it"
SEVERAL_DEVICES = "unproven: an engine has a process for each GPU, but none has run on several yet"
_FEWER_BITS = ("int8", "int4")
_MEMORY_REASONS = ("ModelTooLarge", "StepTooLarge", "KVCacheTooLarge", "KVCacheTooSmall")


class GpuPlacement(NamedTuple):
    config: ExecutionConfig
    """The engine's settings, with the step limits that it chooses on this device."""
    sizes: Sizes
    memory: MemoryPlan
    """With ranks that of the tightest one's device."""
    ranks: tuple[RankSizes, ...] = ()
    """The parts of several devices."""
    tightest: int | None = None


def place(accelerator: Accelerator, config: EngineConfig, header: Header) -> GpuPlacement:
    """Return the placement. Raises `PlanError` if the model does not fit on the accelerator."""
    _check_fp8(accelerator, config)
    try:
        return _place(accelerator, config, header)
    except LoadError as error:
        lacks_memory = error.reason in _MEMORY_REASONS
        remedy = _remedy(accelerator, config, header) if lacks_memory and config.num_ranks == 1 else ""
        raise (DeviceTooSmall if lacks_memory else PlanError)(
            f"{accelerator.name} cannot serve this; the engine would refuse it: {error.reason}: {error.message}{remedy}"
        ) from None


def check_groups(spec: ModelSpec, tensor_parallel: int) -> None:
    """Raise `PlanError` if ranks would hold the same key/value heads, which is never chosen."""
    groups = min((each.num_kv_heads for each in spec.decoder.attentions()), default=0)
    if groups < tensor_parallel:
        raise PlanError(f"{groups} groups of key/value heads are fewer than {tensor_parallel} ranks")


def note_of(accelerator: Accelerator, num_ranks: int) -> str | None:
    """Return why no pod can run so, or none has; `None` if pods do."""
    if accelerator.capability is None:
        return OTHER_MAKER
    return SEVERAL_DEVICES if num_ranks > 1 else None


def _place(accelerator: Accelerator, config: EngineConfig, header: Header) -> GpuPlacement:
    from pagemill_execution.sizing.sizing import (  # imports torch, which other plans do not need
        ranks_on_gpu,
        sizes_on_gpu,
    )

    spec = header.spec
    sizes = sizes_on_gpu(config, header.path, spec)
    free = MemoryState(accelerator.memory_bytes, accelerator.memory_bytes, process_bytes=0, is_gpu=True)
    if config.num_ranks > 1:
        return _place_ranks(config, spec, sizes, ranks_on_gpu(config, header.path, spec), free)
    limited = choose_step_limits(config, spec, sizes, free)
    return GpuPlacement(limited, sizes, plan_memory(limited, spec, sizes, free))


def _place_ranks(
    config: EngineConfig, spec: ModelSpec, whole: Sizes, ranks: Sequence[RankSizes], free: MemoryState
) -> GpuPlacement:
    """Return the placement of ranks that have a device each. All have as many blocks as the tightest one has room for.

    Each is planned as if it sampled, which only one of them does. Raises `LoadError`.
    """
    from pagemill_execution.sizing.rank_parts import together  # imports what reads weights

    heaviest = max(ranks, key=lambda each: each.sizes.weight_bytes)
    limited = choose_step_limits(config, heaviest.spec, heaviest.sizes, free)
    sizes = together(whole, ranks)
    if config.kv_cache_memory_bytes is not None:  # that of all together, as on CPUs
        num_blocks = config.kv_cache_memory_bytes // (sizes.kv_bytes_per_token * config.block_size)
        limited = msgspec.structs.replace(limited, num_kv_blocks=max(1, num_blocks))
    plans = [plan_memory(limited, each.spec, each.sizes, free) for each in ranks]
    memory = min(plans, key=lambda each: (each.num_blocks, each.budget.free_bytes))
    return GpuPlacement(limited, sizes, memory, tuple(ranks), plans.index(memory))


def _check_fp8(accelerator: Accelerator, config: EngineConfig) -> None:
    if accelerator.has_fp8 or "fp8" not in (config.quantization, config.kv_cache_dtype):
        return
    field, other = ("quantization", "w8a8 or int8") if config.quantization == "fp8" else ("kvCacheDtype", "int8")
    able = ", ".join(each.name for each in ACCELERATORS if each.has_fp8)
    has = "" if accelerator.capability is None else " (compute capability {}.{})".format(*accelerator.capability)
    raise PlanError(
        f"{accelerator.name} cannot serve this: spec.engine.{field} fp8 needs hardware for 8-bit floats, which it does "
        f"not have{has}. Set it to {other}, or choose one of {able}."
    )


def _remedy(accelerator: Accelerator, config: EngineConfig, header: Header) -> str:
    """Return a sentence with the devices on which the model fits, and the quantizations with which it fits here."""
    larger = [each for each in ACCELERATORS if each.capability and each.memory_bytes > accelerator.memory_bytes]
    able = [each.name for each in larger if _fits(each, config, header)]
    fewer = [
        bits
        for bits in _FEWER_BITS
        if config.quantization == "none"
        and _fits(accelerator, msgspec.structs.replace(config, quantization=bits), header)
    ]
    here = f"spec.engine.quantization {' or '.join(fewer)} makes it fit on {accelerator.name}"
    found = ([f"it fits on {', '.join(able)}"] if able else []) + ([here] if fewer else [])
    if not found:
        return " It fits on none of the known devices: choose a smaller or a quantized model."
    return f" Of the known devices, {'; '.join(found)}."


def _fits(accelerator: Accelerator, config: EngineConfig, header: Header) -> bool:
    try:
        _place(accelerator, config, header)
    except LoadError:
        return False
    return True
