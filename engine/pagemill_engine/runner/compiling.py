"""Steps of every shape that a GPU's kernels know apart, run once before the first request: none is compiled later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagemill_engine.config import EngineConfig
from pagemill_engine.loading.errors import LoadError
from pagemill_engine.runner.device_runner import DeviceRunner
from pagemill_engine.runner.graphs import CudaRecorder, recorded_shapes
from pagemill_kernels.gpu.launch import num_multiprocessors
from pagemill_kernels.paged_attention.batch import DECODE_LIMIT
from pagemill_protocol.model_spec import ModelSpec

LAUNCH_S = 0.6e-3
"""What the launches of one layer take: 17 ms for 28 layers beside an H100."""
PRODUCTS_PER_S = 1.8e12
"""Of a multiprocessor, each with its sum: half of what an H100's peak is, three quarters of an A100's."""


def compile_kernels(runner: DeviceRunner, config: EngineConfig) -> None:
    """Raises `LoadError` where the memory does not suffice for the largest step, or the device for a kernel."""
    with _refused(config):
        for num_requests, num_tokens in step_shapes(config, runner.info.max_model_len):
            runner.compile(num_requests, num_tokens)
        runner.warm_up_sampling()


def run_largest(runner: DeviceRunner, config: EngineConfig) -> None:
    """The largest step, beside all that lies on the device. Raises `LoadError` where the memory does not suffice."""
    with _refused(config):
        runner.warm_up(*_largest_step(config, runner.info.max_model_len))


def record_steps(runner: DeviceRunner, config: EngineConfig) -> None:
    """As CUDA graphs. Raises `LoadError` where the memory does not suffice for the largest."""
    shapes = recorded_shapes(*config.step, worth_recording(runner.model.spec))
    try:
        runner.record_steps(shapes, CudaRecorder)
    except RuntimeError as error:
        # torch has an error of its own for its allocator; while a graph is instantiated the driver runs out.
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
            raise
        num_tokens, num_requests = largest_recorded(config, runner.model.spec)
        raise LoadError(
            "GraphsTooLarge",
            f"The device ran out of memory while steps of up to {num_requests} requests and {num_tokens} tokens "
            f"were recorded. Lower maxNumSeqs (now {config.step.max_num_seqs}) or kvCacheMemory, or run without CUDA "
            "graphs: "
            "`pagemill serve --no-cuda-graphs`, on Kubernetes `spec.engine.extraArgs: [--cuda-graphs=false]`.",
        ) from error


def worth_recording(spec: ModelSpec) -> int:
    """Tokens up to which launching a step takes longer than computing it: above, padding would cost more than a
    recording saves. An estimate, of launches on one core and of products of floats."""
    layers = spec.decoder.layers
    matrices = sum(math.prod(shape) for layer in layers for shape in layer.shapes().values())
    passed = matrices - sum(each.num_unread_parameters(1) for each in spec.decoder.mixtures())
    return int(LAUNCH_S * len(layers) * PRODUCTS_PER_S * num_multiprocessors() / passed)


def largest_recorded(config: EngineConfig, spec: ModelSpec) -> tuple[int, int]:
    """The most tokens, and the most requests of a decode, that are recorded."""
    shapes = recorded_shapes(*config.step, worth_recording(spec))
    return max(each.num_tokens for each in shapes), max(each.num_requests for each in shapes if each.is_decode)


def step_shapes(config: EngineConfig, max_model_len: int) -> list[tuple[int, int]]:
    """(requests, tokens of all of them): decodes, prefills, many short prompts, and the largest step that there is.

    Launchers choose tiles by the numbers of requests and tokens, in steps of powers of two or more, and attention by
    whether any request has more than `DECODE_LIMIT` tokens: so every choice is among them.
    """
    budget = config.step.max_num_batched_tokens
    several = _powers_to(min(config.step.max_num_seqs, budget))
    decodes = [(num_requests, num_requests) for num_requests in several]
    prefills = [(1, num_tokens) for num_tokens in _powers_to(min(budget, max_model_len))]
    each = min(DECODE_LIMIT, max_model_len)
    short = [(num_requests, min(budget, num_requests * each)) for num_requests in several]
    return list(dict.fromkeys([*decodes, *prefills, *short, _largest_step(config, max_model_len)]))


def _largest_step(config: EngineConfig, max_model_len: int) -> tuple[int, int]:
    """As many tokens as a step may have, of as many requests, each of which samples."""
    budget = config.step.max_num_batched_tokens
    num_requests = min(config.step.max_num_seqs, budget)
    return num_requests, min(budget, num_requests * max_model_len)


def _powers_to(largest: int) -> list[int]:
    return sorted({largest, *(1 << exponent for exponent in range(largest.bit_length()))})


@contextmanager
def _refused(config: EngineConfig) -> Iterator[None]:
    """What the device has too little of becomes a `LoadError` with the setting to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LoadError(
            "StepTooLarge",
            f"The device ran out of memory in a step of maxNumBatchedTokens {config.step.max_num_batched_tokens} and "
            f"maxNumSeqs {config.step.max_num_seqs}. Lower one of them, or kvCacheMemory.",
        ) from error
    except Exception as error:
        if type(error).__name__ != "OutOfResources":
            raise
        # Triton's own, which only a machine with Triton could import.
        raise LoadError(
            "SettingsUnsupported",
            f"A multiprocessor of this device is too small for a kernel of this model as `dtype` {config.dtype} and "
            f"`kv_cache_dtype` {config.kv_cache_dtype} ({error}). Set dtype to bfloat16, or device to cpu.",
        ) from error
