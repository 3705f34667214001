"""Memory profiling before a GPU's first request: compiles kernels, runs the largest steps, sizes the KV cache.

`sizing.budget` computes the sizes from the measurements; `starting.compiling` chooses the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.runners.device.device_runner import DeviceRunner
from pagemill_execution.sizing.budget import MeasuredMemory, Sizes, plan_measured
from pagemill_execution.sizing.kv_sizes import cache_kinds, max_model_len_for
from pagemill_execution.sizing.memory import MemoryState, measure_memory
from pagemill_execution.starting.compiling import compile_kernels, largest_captured, run_largest
from pagemill_models.spec.model_spec import ModelSpec


def measure_device(device: torch.device) -> MemoryState:
    """Return the memory of the device: the host's for the CPU, its own for a GPU."""
    if device.type == "cpu":
        return measure_memory()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return MemoryState(total_bytes, free_bytes, torch.cuda.memory_reserved(device), is_gpu=True)


class Meter(Protocol):
    def free_bytes(self) -> int:
        """Return the free memory of the device in bytes, while nothing runs."""

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return the most bytes that `run` allocates on the device."""


class CudaMeter:
    def free_bytes(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return the peak that the allocator reserved, so that its fragmentation counts."""
        self.free_bytes()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_reserved()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - before_bytes


def profile_memory(
    runner: DeviceRunner,
    config: ExecutionConfig,
    spec: ModelSpec,
    sizes: Sizes,
    before: MemoryState,
    meter: Meter,
    least: Callable[[int], int] | None = None,
    draft_block_bytes: int = 0,
) -> None:
    """Size the KV cache by measured steps. Raises `LoadError`.

    `spec`: of the whole model. `before`: the device's memory before the weights. `least`: gives other ranks a number of
    blocks and returns the least of all; None: there are none. `draft_block_bytes`: of `cache_kinds`. The contents of
    the runner's cache are lost.
    """
    alone = least is None and not draft_block_bytes
    step_bytes = meter.peak_bytes(lambda: compile_kernels(runner, config))
    graph_bytes = _graph_bytes(runner, config, spec, meter) if config.cuda_graphs else 0
    sizes = sizes._replace(weight_bytes=runner.weight_bytes)
    measured = MeasuredMemory(meter.free_bytes(), step_bytes, graph_bytes)
    num_blocks, budget = plan_measured(config, spec, sizes, before, measured)
    num_blocks = num_blocks if least is None else least(num_blocks)
    cache = cache_kinds(config, spec, runner.kv_cache.kind, num_blocks, draft_block_bytes)
    longest = max_model_len_for(config, spec, cache, shares_memory=alone)
    info = runner.info.with_cache(cache, shares_memory=alone)
    runner.resize_cache(info._replace(max_model_len=min(info.max_model_len, longest), memory=budget))
    # Memory that was measured in pieces must also be available in one step.
    run_largest(runner, config)


def _graph_bytes(runner: DeviceRunner, config: ExecutionConfig, spec: ModelSpec, meter: Meter) -> int:
    """Return the bytes of the CUDA graphs, which share the memory of the largest decode or other step."""
    num_tokens, num_requests = largest_captured(config, spec)

    def run() -> None:
        runner.warm_up(num_requests, num_requests)
        runner.warm_up(num_requests, min(num_tokens, num_requests * runner.info.max_model_len))

    return meter.peak_bytes(run) + runner.graph_bytes(num_tokens, num_requests)
