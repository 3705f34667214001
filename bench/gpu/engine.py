"""The whole engine with random weights, without a server: scheduler, KV cache, runner and sampler; and its
reference.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from driving import Driver
from measuring import Device
from models import RandomWeights

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.decoders.on_torch.decoder import Decoder
from pagemill_execution.decoders.on_torch.device_rotations import DeviceRotations
from pagemill_execution.decoders.on_torch.filling import load_weights, weight_bytes
from pagemill_execution.decoders.rope import decoder_tables
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.runners.device.device_kv_cache import DeviceKVCache
from pagemill_execution.runners.device.device_runner import DeviceRunner, InFlight
from pagemill_execution.runners.eager import EagerRunner
from pagemill_execution.runners.kv_cache import KVCache
from pagemill_execution.runners.torch_model import TorchModel
from pagemill_execution.sizing.budget import MemoryPlan, Sizes, plan_memory
from pagemill_execution.sizing.kv_sizes import cache_kinds, kv_bytes_per_token
from pagemill_execution.sizing.memory import MemoryState
from pagemill_execution.starting.compiling import capture_graphs
from pagemill_execution.starting.memory_profiling import CudaMeter, measure_device, profile_memory
from pagemill_execution.step import StepPlan
from pagemill_kernels.registry import ops_for
from pagemill_kernels.torch_arrays import float_type_of
from pagemill_models.spec.model_spec import ModelSpec

MAX_SEQS = 256
MAX_BATCHED_TOKENS = 8192
MAX_MODEL_LEN = 2304
PLENTY = MemoryState(1 << 34, 1 << 34, 0)
"""The memory state without a device: the cache is small."""


class Engine:
    """An engine as it serves: compiled, with profiled memory and captured CUDA graphs."""

    def __init__(
        self, device: Device, spec: ModelSpec, *, forbids_waiting: bool = False, max_model_len: int = MAX_MODEL_LEN
    ) -> None:
        """With `forbids_waiting`, a launch in which the host waits for the device fails."""
        config = _config(device, max_model_len)
        ops = ops_for("triton")
        state = measure_device(ops.device) if device.on_gpu else PLENTY
        begin_s = time.perf_counter()
        model = Decoder(spec, ops, device.dtype)
        weights = RandomWeights(spec)
        self.kv_bytes_per_token = kv_bytes_per_token(spec, float_type_of(device.dtype))
        sizes = Sizes(weights_bytes(weights, device), self.kv_bytes_per_token, device.dtype.itemsize, gathers=False)
        plan = plan_memory(config, spec, sizes, state)
        load_weights(model, weights)
        self.weight_bytes = weight_bytes(model)
        info = _info(config, spec, plan, device)._replace(
            weight_bytes=self.weight_bytes, kv_bytes_per_token=self.kv_bytes_per_token
        )
        kind = float_type_of(device.dtype)
        blocks = cache_kinds(config, spec, kind, plan.num_blocks)
        info = info.with_cache(blocks, shares_memory=True)
        counts = [0] * len(blocks.counts) if device.on_gpu else blocks.counts
        cache = DeviceKVCache(
            spec, counts, config.block_size, kind, ops.device, blocks.kinds, max_rows=config.step.max_num_seqs,
            most_proposed=blocks.most_proposed,
        )  # fmt: skip
        tables = decoder_tables(spec.decoder, info.max_model_len, weights)
        rotations = DeviceRotations(tables, device.dtype, ops.device)
        runner = DeviceRunner(model, ops, cache, rotations, info, config.step.max_num_seqs)
        device.synchronize()
        self.load_s = time.perf_counter() - begin_s
        if device.on_gpu:
            profile_memory(runner, config, spec, sizes, state, CudaMeter())
            capture_graphs(runner, config, spec)
        device.synchronize()
        self.compile_s = time.perf_counter() - begin_s - self.load_s
        self.num_kv_tokens = runner.info.num_blocks * config.block_size
        if forbids_waiting and device.on_gpu:
            runner.launch = _without_waiting(runner.launch)  # type: ignore[method-assign, assignment]
        self._runner = runner
        self.driver = Driver(device, EngineCore(config, runner))
        # An engine does this before it serves: objects that stay are not visited by every garbage collection.
        gc.collect()
        gc.freeze()

    @contextmanager
    def launched_piece_by_piece(self) -> Iterator[None]:
        """Use no CUDA graphs in the block."""
        graphs, self._runner._graphs = self._runner._graphs, None
        try:
            yield
        finally:
            self._runner._graphs = graphs


def by_the_formulas(device: Device, spec: ModelSpec) -> Driver:
    """Return a driver of the same model on the host, with the reference implementation of each operation."""
    config, ops = _config(device, MAX_MODEL_LEN), ops_for("reference")
    model, weights = Decoder(spec, ops, torch.float32), RandomWeights(spec)
    load_weights(model, weights)
    sizes = Sizes(weight_bytes(model), kv_bytes_per_token(spec, "float32"), 4, gathers=False)
    plan = plan_memory(config, spec, sizes, PLENTY)
    info = _info(config, spec, plan, device)._replace(device="cpu")
    cache = KVCache(spec, plan.num_blocks, config.block_size, "float32")
    tables = decoder_tables(spec.decoder, info.max_model_len, weights)
    executor = TorchModel(model, ops, DeviceRotations(tables, torch.float32, ops.device))
    runner = EagerRunner(executor, cache, info, config.step.max_num_seqs)
    return Driver(device, EngineCore(config, runner))


def _info(config: EngineConfig, spec: ModelSpec, plan: MemoryPlan, device: Device) -> RunnerInfo:
    return RunnerInfo(
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_model_len=min(config.max_model_len or MAX_MODEL_LEN, spec.max_position_embeddings),
        vocab_size=spec.vocab_size,
        weights_digest="",
        kv_dtype=str(device.dtype),
        weight_bytes=0,
        kv_bytes_per_token=0,
        compute=device.name,
        device="cuda",
        memory=plan.budget,
    )


def _without_waiting(launch: Callable[[StepPlan], InFlight]) -> Callable[[StepPlan], InFlight]:
    def watched(plan: StepPlan) -> InFlight:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


def weights_bytes(weights: RandomWeights, device: Device) -> int:
    """Return the bytes of all tensors; a tied head is the embedding."""
    return sum(math.prod(shape) for shape in weights.shapes.values()) * device.dtype.itemsize


def _config(device: Device, max_model_len: int) -> EngineConfig:
    if device.tiny:
        return EngineConfig(model="random", device="cuda", max_num_seqs=4, max_num_batched_tokens=16, num_kv_blocks=32)
    return EngineConfig(
        model="random",
        device="cuda",
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=max_model_len,
        max_num_waiting=4096,
        enable_prefix_caching=False,
    )
