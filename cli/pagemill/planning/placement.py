"""Computes step limits and memory of a model on an accelerator that this machine need not have.

The bytes come from the engine's own memory budget. If the model does not fit, the error names the device, the cause,
and other devices or quantizations that fit.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pagemill.planning.accelerators import ACCELERATORS, Accelerator
from pagemill.planning.errors import PlanError
from pagemill.planning.headers import Header
from pagemill_engine.config import EngineConfig
from pagemill_engine.sizing.budget import MemoryPlan, Sizes, plan_memory
from pagemill_engine.sizing.memory import MemoryState
from pagemill_engine.sizing.step_limits import choose_step_limits
from pagemill_engine.weights.errors import LoadError

OTHER_MAKER = "for comparison of data sheets only: the engine's kernels need NVIDIA's devices, so no pod can run on it"
_FEWER_BITS = ("int8", "int4")
_MEMORY_REASONS = ("ModelTooLarge", "StepTooLarge", "KVCacheTooLarge", "KVCacheTooSmall")


class GpuPlacement(NamedTuple):
    config: EngineConfig
    """The engine's settings, with the step limits that it chooses on this device."""
    sizes: Sizes
    memory: MemoryPlan


def place(accelerator: Accelerator, config: EngineConfig, header: Header) -> GpuPlacement:
    """Return the placement. Raises `PlanError` if the model does not fit on the accelerator."""
    _check_fp8(accelerator, config)
    if config.num_ranks > 1:
        raise PlanError(
            f"{accelerator.name} cannot serve this: spec.engine.tensorParallel {config.tensor_parallel_size} and "
            f"pipelineParallel {config.pipeline_parallel_size} divide models among processes on CPUs only in this "
            "version. Set both to 1, or plan with step times of a CPU (--fit)."
        )
    try:
        return _place(accelerator, config, header)
    except LoadError as error:
        remedy = _remedy(accelerator, config, header) if error.reason in _MEMORY_REASONS else ""
        raise PlanError(
            f"{accelerator.name} cannot serve this; the engine would refuse it: {error.reason}: {error.message}{remedy}"
        ) from None


def note_of(accelerator: Accelerator) -> str | None:
    """Return a remark about the device; `None` if there is none."""
    return OTHER_MAKER if accelerator.capability is None else None


def _place(accelerator: Accelerator, config: EngineConfig, header: Header) -> GpuPlacement:
    from pagemill_engine.sizing.sizing import sizes_on_gpu  # imports torch, which other plans do not need

    spec = header.spec
    sizes = sizes_on_gpu(config, header.path, spec)
    free = MemoryState(accelerator.memory_bytes, accelerator.memory_bytes, process_bytes=0, is_gpu=True)
    limited = choose_step_limits(config, spec, sizes, free)
    return GpuPlacement(limited, sizes, plan_memory(limited, spec, sizes, free))


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
