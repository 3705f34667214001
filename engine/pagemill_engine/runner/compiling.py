"""Steps of every shape that a GPU's kernels know apart, run once before the first request: none is compiled later."""

from __future__ import annotations

import torch

from pagemill_engine.config import EngineConfig
from pagemill_engine.loading.errors import LoadError
from pagemill_engine.runner.device_runner import DeviceRunner
from pagemill_engine.runner.graphs import CudaRecorder, graph_sizes


def compile_kernels(runner: DeviceRunner, config: EngineConfig) -> None:
    """Raises `LoadError` where the memory does not suffice for the largest step."""
    try:
        for num_requests, num_tokens in step_shapes(config, runner.info.max_model_len):
            runner.warm_up(num_requests, num_tokens)
        runner.warm_up_sampling()
    except torch.OutOfMemoryError as error:
        raise LoadError(
            "StepTooLarge",
            f"The device ran out of memory in a step of maxNumBatchedTokens {config.max_num_batched_tokens} and "
            f"maxNumSeqs {config.max_num_seqs}. Lower one of them, or kvCacheMemory.",
        ) from error


def record_decodes(runner: DeviceRunner, config: EngineConfig) -> None:
    """As CUDA graphs. Raises `LoadError` where the memory does not suffice for the largest."""
    largest = largest_decode(config)
    try:
        runner.record_decodes(graph_sizes(largest), CudaRecorder)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            "GraphsTooLarge",
            f"The device ran out of memory while decodes of up to {largest} requests were recorded. Lower maxNumSeqs "
            f"(now {config.max_num_seqs}) or kvCacheMemory, or turn cuda_graphs off.",
        ) from error


def largest_decode(config: EngineConfig) -> int:
    """Requests of the largest decode that is recorded."""
    return graph_sizes(min(config.max_num_seqs, config.max_num_batched_tokens))[-1]


def step_shapes(config: EngineConfig, max_model_len: int) -> list[tuple[int, int]]:
    """(requests, tokens of each): decodes and prefills of all powers of two, and the largest of both.

    Launchers choose tiles by powers of two, so every choice is among them.
    """
    decodes = _powers_to(min(config.max_num_seqs, config.max_num_batched_tokens))
    prefills = _powers_to(min(config.max_num_batched_tokens, max_model_len))
    return [(num_requests, 1) for num_requests in decodes] + [(1, num_tokens) for num_tokens in prefills]


def _powers_to(largest: int) -> list[int]:
    return sorted({largest, *(1 << exponent for exponent in range(largest.bit_length()))})
