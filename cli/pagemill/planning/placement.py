"""A model on an accelerator that need not be here: step limits and memory, or why the device does not carry it.

Bytes are those of the engine's own budget; a refusal names the device, the cause and what would do instead: other
devices, or fewer bits on this one.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pagemill.planning.accelerators import ACCELERATORS, Accelerator
from pagemill.planning.errors import PlanError
from pagemill.planning.headers import Header
from pagemill_engine.config import EngineConfig
from pagemill_engine.loading.errors import LoadError
from pagemill_engine.runner.budget import MemoryPlan, Sizes, plan_memory
from pagemill_engine.runner.memory import MemoryState
from pagemill_engine.runner.step_limits import choose_step_limits

OTHER_MAKER = "the engine's kernels are for NVIDIA's devices; its figures compare data sheets, and no pod runs there"
_FEWER_BITS = ("int8", "int4")
_MEMORY_REASONS = ("ModelTooLarge", "StepTooLarge", "KVCacheTooLarge", "KVCacheTooSmall")


class Placement(NamedTuple):
    config: EngineConfig
    """With the limits of a step that an engine there chooses."""
    sizes: Sizes
    memory: MemoryPlan


def place(accelerator: Accelerator, config: EngineConfig, header: Header) -> Placement:
    """Raises `PlanError`."""
    _check_fp8(accelerator, config)
    try:
        return _place(accelerator, config, header)
    except LoadError as error:
        remedy = _remedy(accelerator, config, header) if error.reason in _MEMORY_REASONS else ""
        raise PlanError(
            f"{accelerator.name} does not carry this; the engine would refuse it: {error.reason}: {error.message}"
            f"{remedy}"
        ) from None


def note_of(accelerator: Accelerator) -> str | None:
    """What is to be known of the device itself."""
    return OTHER_MAKER if accelerator.capability is None else None


def _place(accelerator: Accelerator, config: EngineConfig, header: Header) -> Placement:
    from pagemill_engine.runner.sizing import sizes_on_gpu  # imports torch, which a measured plan does not need

    spec = header.spec
    sizes = sizes_on_gpu(config, header.path, spec)
    free = MemoryState(accelerator.memory_bytes, accelerator.memory_bytes, process_bytes=0, is_gpu=True)
    limited = choose_step_limits(config, spec, sizes, free)
    return Placement(limited, sizes, plan_memory(limited, spec, sizes, free))


def _check_fp8(accelerator: Accelerator, config: EngineConfig) -> None:
    if accelerator.has_fp8 or "fp8" not in (config.quantization, config.kv_cache_dtype):
        return
    field, other = ("quantization", "w8a8 or int8") if config.quantization == "fp8" else ("kvCacheDtype", "int8")
    able = ", ".join(each.name for each in ACCELERATORS if each.has_fp8)
    has = "" if accelerator.capability is None else " (compute capability {}.{})".format(*accelerator.capability)
    raise PlanError(
        f"{accelerator.name} does not carry this: spec.engine.{field} fp8 needs hardware for floats of 8 bits, which "
        f"it has not{has}. Set it to {other}, or take one of {able}."
    )


def _remedy(accelerator: Accelerator, config: EngineConfig, header: Header) -> str:
    """Which devices would carry it, and which quantization would make it fit on this one."""
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
        return " No device known here holds it: take a smaller model, or one that is quantized."
    return f" As known here, {'; '.join(found)}."


def _fits(accelerator: Accelerator, config: EngineConfig, header: Header) -> bool:
    try:
        _place(accelerator, config, header)
    except LoadError:
        return False
    return True
