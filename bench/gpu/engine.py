"""The whole engine over random weights: scheduler, KV cache, runner and sampler as they serve, without a server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from measuring import Device
from models import RandomWeights
from workloads import Job

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.models.registry import build_model
from pagemill_engine.models.rope import rope_tables
from pagemill_engine.models.weights import load_weights, weight_bytes
from pagemill_engine.runner.base import RunnerInfo
from pagemill_engine.runner.budget import Sizes, plan_memory
from pagemill_engine.runner.compiling import record_decodes
from pagemill_engine.runner.device_memory import measure_device
from pagemill_engine.runner.device_runner import DeviceRunner, InFlight
from pagemill_engine.runner.kv_cache import KVCache, kv_bytes_per_token
from pagemill_engine.runner.memory import MemoryState
from pagemill_engine.runner.settling import CudaMeter, settle
from pagemill_engine.scheduler.step import StepPlan
from pagemill_kernels.registry import ops_for
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.model_spec import ModelSpec
from pagemill_protocol.sampling import SamplingParams

MAX_SEQS = 256
MAX_BATCHED_TOKENS = 8192
MAX_MODEL_LEN = 2304
TEMPERATURE = 0.6


class Offline(NamedTuple):
    seconds: float
    num_steps: int
    cpu_s: float
    """Of this thread, waiting for the device included."""


class Online(NamedTuple):
    """Sorted, seconds."""

    ttft_s: list[float]
    tpot_s: list[float]


class Engine:
    def __init__(self, device: Device, spec: ModelSpec, *, forbids_waiting: bool = False) -> None:
        """`forbids_waiting`: a launch in which the host waits for the device fails."""
        self._device = device
        config = _config(device)
        ops = ops_for("triton")
        state = measure_device(ops.device) if device.on_gpu else MemoryState(1 << 34, 1 << 34, 0)
        begin_s = time.perf_counter()
        model = build_model(spec, ops, device.dtype)
        weights = RandomWeights(model)
        self.kv_bytes_per_token = kv_bytes_per_token(spec, device.dtype)
        sizes = Sizes(spec_bytes(spec, weights, device), self.kv_bytes_per_token, device.dtype.itemsize, gathers=False)
        plan = plan_memory(config, spec, sizes, state)
        load_weights(model, weights)
        self.weight_bytes = weight_bytes(model)
        info = RunnerInfo(
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
            max_model_len=min(MAX_MODEL_LEN, spec.max_position_embeddings),
            vocab_size=spec.vocab_size,
            weights_digest="",
            kv_dtype=str(device.dtype),
            weight_bytes=self.weight_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token,
            compute=device.name,
            device="cuda",
            memory=plan.budget,
        )
        num_blocks = 0 if device.on_gpu else plan.num_blocks
        cache = KVCache(spec, num_blocks, config.block_size, device.dtype, ops.device)
        rope = rope_tables(spec.head_dim, info.max_model_len, spec.rope_theta, spec.rope_scaling, device.dtype)
        runner = DeviceRunner(model, ops, cache, rope, info, config.max_num_seqs)
        device.synchronize()
        self.load_s = time.perf_counter() - begin_s
        if device.on_gpu:
            settle(runner, config, spec, sizes, state, CudaMeter())
            record_decodes(runner, config)
        device.synchronize()
        self.compile_s = time.perf_counter() - begin_s - self.load_s
        self.num_kv_tokens = runner.info.num_blocks * config.block_size
        if forbids_waiting and device.on_gpu:
            runner.launch = _without_waiting(runner.launch)  # type: ignore[method-assign, assignment]
        self._core = EngineCore(config, runner)
        self._num_requests = 0

    def offline(self, jobs: list[Job]) -> Offline:
        """All requests at once, to the last token."""
        for job in jobs:
            self._add(job)
        begin_s, begin_cpu_s, num_steps = time.perf_counter(), time.thread_time(), 0
        while self._core.has_work:
            failed = [output.error for output in self._core.step().outputs if output.error is not None]
            if failed:
                raise AssertionError(failed[0])
            num_steps += 1
        self._device.synchronize()
        return Offline(time.perf_counter() - begin_s, num_steps, time.thread_time() - begin_cpu_s)

    def online(self, jobs: list[Job], requests_per_s: float) -> Online:
        """Requests come at random moments, whatever the engine does; times count from their arrival."""
        draw = random.Random(2)
        arrivals, at_s = [], 0.0
        for _ in jobs:
            at_s += draw.expovariate(requests_per_s)
            arrivals.append(at_s)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        names: list[str] = []
        begin_s = time.perf_counter()
        while len(names) < len(jobs) or self._core.has_work:
            now_s = time.perf_counter() - begin_s
            while len(names) < len(jobs) and arrivals[len(names)] <= now_s:
                names.append(self._add(jobs[len(names)]))
            if not self._core.has_work:
                time.sleep(arrivals[len(names)] - now_s)
                continue
            for output in self._core.step().outputs:
                told_s = time.perf_counter() - begin_s
                first.setdefault(output.request_id, told_s)
                last[output.request_id] = told_s
        return Online(
            sorted(first[name] - arrival for name, arrival in zip(names, arrivals, strict=True)),
            sorted(
                (last[name] - first[name]) / max(1, job.num_output_tokens - 1)
                for name, job in zip(names, jobs, strict=True)
            ),
        )

    def _add(self, job: Job) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        sampling = SamplingParams(
            temperature=TEMPERATURE, seed=self._num_requests, max_tokens=job.num_output_tokens, ignore_eos=True
        )
        prompt = job.prompt_token_ids
        self._core.add(GenerateRequest(request_id=name, model="random", prompt_token_ids=prompt, sampling=sampling))
        return name


def _without_waiting(launch: Callable[[StepPlan], InFlight]) -> Callable[[StepPlan], InFlight]:
    def watched(plan: StepPlan) -> InFlight:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


def spec_bytes(spec: ModelSpec, weights: RandomWeights, device: Device) -> int:
    """Of all tensors; a tied head is the embedding."""
    shapes = {name: shape for name, shape in weights.shapes.items() if not _is_tied_head(spec, name)}
    return sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes.values()) * device.dtype.itemsize


def _is_tied_head(spec: ModelSpec, name: str) -> bool:
    return spec.tie_word_embeddings and name == "lm_head.weight"


def _config(device: Device) -> EngineConfig:
    if device.tiny:
        return EngineConfig(model="random", device="cuda", max_num_seqs=4, max_num_batched_tokens=16, num_kv_blocks=32)
    return EngineConfig(
        model="random",
        device="cuda",
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        max_num_waiting=4096,
        enable_prefix_caching=False,
    )
