"""Numbers of compute threads: of one process, or of each of several that compute a model together."""

from __future__ import annotations

from collections.abc import Callable

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.sizing.compute import Compute
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.registry import has_torch
from pagemill_models.sharding.slices import dealt
from pagemill_servers.process.cgroup import usable_cores


def threads_of_ranks(config: ExecutionConfig) -> list[int]:
    """Return the number of threads of each process of this node. Raises `LoadError` if there are fewer than
    processes."""
    number, size = config.num_threads or usable_cores(), config.ranks_here
    if number < size:
        raise LoadError(
            "SettingsUnsupported",
            f"tensorParallel {config.tensor_parallel_size} x pipelineParallel {config.pipeline_parallel_size} are "
            f"{size} processes {'of each node ' if config.nodes else ''}that compute at the same time, but they may "
            f"use {number} {'core' if number == 1 else 'cores'}. Lower one of them, or raise resources.cpu or the "
            "number of threads.",
        )
    return [end - first for first, end in dealt(number, size)]


def torch_threads(compute: Compute, number: int) -> Callable[[], object] | None:
    """Set torch's number of threads. Returns a function that does so on another thread, since torch keeps it per
    thread; None where torch computes nothing. Raises `LoadError` where it is missing."""
    if compute.is_native:
        return None
    if not has_torch():
        on_torch = compute.how if compute.how.startswith("torch") else f"torch ({compute.how})"
        raise LoadError(
            "TorchNotInstalled",
            f"This model runs on {on_torch}, which is not installed. Install `pagemill[torch]`, or take the "
            "engine's image for GPUs (spec.engine.image).",
        )
    import torch

    torch.set_num_threads(number)
    return lambda: torch.set_num_threads(number)
