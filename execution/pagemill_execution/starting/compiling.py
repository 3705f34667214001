"""Compiles a GPU's kernels before the first request, by running steps of every shape that kernels distinguish."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.runners.device.device_runner import DeviceRunner
from pagemill_execution.runners.device.graphs import CudaGraphCapturer, shapes_to_capture
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.gpu.launch import num_multiprocessors
from pagemill_kernels.paged_attention.batch import DECODE_LIMIT
from pagemill_models.spec.model_spec import ModelSpec

LAUNCH_S = 0.6e-3
"""Time to launch the kernels of one layer: 17 ms for 28 layers on the host of an H100."""
PRODUCTS_PER_S = 1.8e12
"""Multiply-adds per second of one multiprocessor: half of an H100's peak, three quarters of an A100's."""


def compile_kernels(runner: DeviceRunner, config: ExecutionConfig) -> None:
    """Compile all kernels.

    Raises `LoadError` if the memory is too small for the largest step or the device for a kernel.
    """
    with _refused(config):
        for num_requests, num_tokens in step_shapes(config, runner.info.max_model_len):
            runner.compile(num_requests, num_tokens)
        runner.warm_up_sampling()


def run_largest(runner: DeviceRunner, config: ExecutionConfig) -> None:
    """Run the largest step with everything else in the device's memory. Raises `LoadError` if memory is too small."""
    with _refused(config):
        runner.warm_up(*_largest_step(config, runner.info.max_model_len))


def capture_graphs(runner: DeviceRunner, config: ExecutionConfig, spec: ModelSpec) -> None:
    """Record steps as CUDA graphs. Raises `LoadError` if memory is too small for the largest.

    `spec`: of the whole model, so that all ranks pad steps alike.
    """
    shapes = shapes_to_capture(*config.step, max_captured_tokens(spec))
    try:
        runner.capture_graphs(shapes, CudaGraphCapturer)
    except RuntimeError as error:
        # torch's allocator raises an error class of its own; the driver runs out while a graph is instantiated.
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
            raise
        num_tokens, num_requests = largest_captured(config, spec)
        raise LoadError(
            "GraphsTooLarge",
            f"The device ran out of memory while steps of up to {num_requests} requests and {num_tokens} tokens "
            f"were recorded. Lower maxNumSeqs (now {config.step.max_num_seqs}) or kvCacheMemory, or run without CUDA "
            "graphs: "
            "`pagemill serve --no-cuda-graphs`, on Kubernetes `spec.engine.extraArgs: [--cuda-graphs=false]`.",
        ) from error


def max_captured_tokens(spec: ModelSpec) -> int:
    """Return the most tokens of a step whose launches take longer than its computation.

    In larger steps padding costs more than a captured graph saves. This is an estimate, for launches on one core and
    multiplications of floats.
    """
    layers = spec.decoder.layers
    matrices = sum(math.prod(shape) for layer in layers for shape in layer.shapes().values())
    passed = matrices - sum(each.num_unread_parameters(1) for each in spec.decoder.mixtures())
    return int(LAUNCH_S * len(layers) * PRODUCTS_PER_S * num_multiprocessors() / passed)


def largest_captured(config: ExecutionConfig, spec: ModelSpec) -> tuple[int, int]:
    """Return the most tokens, and the most requests of a decode, that are recorded."""
    shapes = shapes_to_capture(*config.step, max_captured_tokens(spec))
    return max(each.num_tokens for each in shapes), max(each.num_requests for each in shapes if each.is_decode)


def step_shapes(config: ExecutionConfig, max_model_len: int) -> list[tuple[int, int]]:
    """Return (requests, tokens of all of them) of decodes, prefills, many short prompts, and the largest step.

    Launchers choose tiles by the numbers of requests and tokens, in steps of powers of two or more, and attention by
    whether any request has more than `DECODE_LIMIT` tokens, so these shapes cover every choice.
    """
    budget = config.step.max_num_batched_tokens
    several = _powers_to(min(config.step.max_num_seqs, budget))
    decodes = [(num_requests, num_requests) for num_requests in several]
    prefills = [(1, num_tokens) for num_tokens in _powers_to(min(budget, max_model_len))]
    each = min(DECODE_LIMIT, max_model_len)
    short = [(num_requests, min(budget, num_requests * each)) for num_requests in several]
    return list(dict.fromkeys([*decodes, *prefills, *short, _largest_step(config, max_model_len)]))


def _largest_step(config: ExecutionConfig, max_model_len: int) -> tuple[int, int]:
    """Return the shape of the most tokens and requests that a step may have; each request samples."""
    budget = config.step.max_num_batched_tokens
    num_requests = min(config.step.max_num_seqs, budget)
    return num_requests, min(budget, num_requests * max_model_len)


def _powers_to(largest: int) -> list[int]:
    return sorted({largest, *(1 << exponent for exponent in range(largest.bit_length()))})


@contextmanager
def _refused(config: ExecutionConfig) -> Iterator[None]:
    """Turn the errors of a device that is too small into `LoadError`s that name the setting to change."""
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
        # This is Triton's exception, whose class can be imported only where Triton is installed.
        raise LoadError(
            "SettingsUnsupported",
            f"A multiprocessor of this device is too small for a kernel of this model as `dtype` {config.dtype} and "
            f"`kv_cache_dtype` {config.kv_cache_dtype} ({error}). Set dtype to bfloat16, or device to cpu.",
        ) from error
