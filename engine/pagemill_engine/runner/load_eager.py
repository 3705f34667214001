"""Puts a runner together: device, threads, types, weights, KV cache, and every kernel compiled that steps will need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from pagemill_engine.config import EngineConfig
from pagemill_engine.loading.codes import in_words
from pagemill_engine.loading.early_digest import EarlyDigest
from pagemill_engine.loading.errors import LoadError
from pagemill_engine.loading.source import WeightSource
from pagemill_engine.loading.weights import stored_as
from pagemill_engine.models.decoder import Decoder, Model
from pagemill_engine.models.errors import UnsupportedModelError, WeightsError
from pagemill_engine.models.fusing import fuse_layers
from pagemill_engine.models.rope import Rotations, decoder_tables
from pagemill_engine.models.weights import check_depth, load_weights, weight_bytes
from pagemill_engine.runner.base import Runner, RunnerInfo
from pagemill_engine.runner.budget import keeps_nothing, plan_memory
from pagemill_engine.runner.compiling import record_decodes
from pagemill_engine.runner.compute import choose_compute
from pagemill_engine.runner.device_memory import measure_device
from pagemill_engine.runner.device_runner import DeviceRunner
from pagemill_engine.runner.eager import EagerRunner
from pagemill_engine.runner.encoder_runner import EncoderRunner
from pagemill_engine.runner.kv_cache import KVCache, kv_bytes_per_token, max_model_len_for
from pagemill_engine.runner.memory import give_back
from pagemill_engine.runner.pooling import Pooler
from pagemill_engine.runner.pooling_runner import PoolingRunner
from pagemill_engine.runner.settling import CudaMeter, settle
from pagemill_engine.runner.sizing import held_by, sizes_of, weights_of
from pagemill_engine.runner.step_limits import choose_step_limits
from pagemill_engine.runner.threaded import ThreadedRunner
from pagemill_kernels.gpu.kept import keep_compiled
from pagemill_kernels.registry import Ops
from pagemill_protocol.cgroup import usable_cores
from pagemill_protocol.model_spec import ModelSpec

ANY_NUMBER = 1 << 40
"""Stands for the number of blocks until it is known."""
LoadedRunner = EagerRunner | EncoderRunner | DeviceRunner


def load_runner(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    progress: Callable[[str, str], None],
    early_digest: EarlyDigest | None = None,
) -> LoadedRunner:
    """Raises `LoadError`."""
    try:
        return _load(config, path, spec, progress, early_digest)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            "ModelTooLarge",
            f"The device ran out of memory while `{path}` was loaded ({str(error).partition('. ')[0]}). See that "
            "nothing else takes its memory, use a smaller or quantized model, or lower maxNumSeqs or maxModelLen.",
        ) from error


def _load(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    progress: Callable[[str, str], None],
    early_digest: EarlyDigest | None,
) -> LoadedRunner:
    torch.set_num_threads(config.num_threads or usable_cores())
    compute = choose_compute(config, spec)
    dtype, activation_dtype, kv_dtype, ops = compute.dtype, compute.activation_dtype, compute.kv_dtype, compute.ops
    try:
        weights = weights_of(config, path, spec, ops.keeps_floats8, early_digest)
        if not spec.decoder.by_transformers:
            check_depth(spec.decoder, weights.shapes)
        sizes = sizes_of(config, weights, spec, held_by(compute))
        before = measure_device(ops.device)
        config = choose_step_limits(config, spec, sizes, before)
        num_blocks, budget = plan_memory(config, spec, sizes, before)
        progress("loading", f"{path.name}: {_held(config, path, spec, ops, weights, dtype)}, {compute.how}")
        model = _model(path, spec, ops, activation_dtype, weights)
        give_back()
        settles = settles_on(ops.device)
        max_model_len = max_model_len_for(config, spec, ANY_NUMBER if settles else num_blocks)
        rotations = Rotations(decoder_tables(spec.decoder, max_model_len, activation_dtype, weights), ops.device)
    except UnsupportedModelError as error:
        raise LoadError("UnsupportedArchitecture", f"`{path}`: {error}") from error
    except WeightsError as error:
        raise LoadError("ModelUnreadable", f"`{path}`: {error}") from error
    kv_bytes = kv_bytes_per_token(spec, kv_dtype)
    if not settles and not keeps_nothing(spec):
        progress("allocating", _cache_in_words(num_blocks, config.block_size, kv_bytes, kv_dtype))
    held_bytes = weight_bytes(model)
    info = RunnerInfo(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        weights_digest=weights.digest(),
        kv_dtype=_name(kv_dtype),
        weight_bytes=held_bytes,
        kv_bytes_per_token=kv_bytes,
        compute=f"{_name(dtype)}, {compute.how}",
        device=ops.device.type,
        memory=msgspec.structs.replace(budget, weight_bytes=held_bytes),
        step=config.step,
        pooling=spec.pooling,
    )
    num_allocated = 0 if settles else num_blocks
    by_block = ops.on_device is None
    kv_cache = KVCache(spec, num_allocated, config.block_size, kv_dtype, ops.device, by_block=by_block)
    runner = _runner(spec, model, ops, kv_cache, rotations, info, config.step.max_num_seqs)
    if settles:
        assert isinstance(runner, DeviceRunner)
        progress("warming", _keep_kernels(config.kernel_cache_dir))
        settle(runner, config, spec, sizes, before, CudaMeter())
        progress("allocating", _cache_in_words(runner.info.num_blocks, config.block_size, kv_bytes, kv_dtype))
        if config.cuda_graphs:
            progress("warming", "recording decodes")
            record_decodes(runner, config)
    return runner


def _runner(
    spec: ModelSpec, model: Model, ops: Ops, kv_cache: KVCache, rotations: Rotations, info: RunnerInfo, num_rows: int
) -> LoadedRunner:
    """The runner for what the model does and where it computes."""
    if spec.pooling is not None:
        assert isinstance(model, Decoder)
        pooler = Pooler(spec.pooling, model.classifier)
        if keeps_nothing(spec):
            return EncoderRunner(model, ops, kv_cache, rotations, info, pooler)
        return PoolingRunner(model, ops, kv_cache, rotations, info, num_rows, pooler)
    if ops.on_device is None:
        return EagerRunner(model, ops, kv_cache, rotations, info, num_rows)
    assert isinstance(model, Decoder)
    return DeviceRunner(model, ops, kv_cache, rotations, info, num_rows)


def _model(path: Path, spec: ModelSpec, ops: Ops, dtype: torch.dtype, weights: WeightSource) -> Model:
    """With its weights, and as few calls as the device allows."""
    if spec.decoder.by_transformers:
        from pagemill_engine.transformers_backend.model import TransformersDecoder

        return TransformersDecoder(path, spec, ops, dtype)
    model = Decoder(spec, ops, dtype)
    load_weights(model, weights)
    fuse_layers(model, ops)
    return model


def _held(
    config: EngineConfig, path: Path, spec: ModelSpec, ops: Ops, weights: WeightSource, dtype: torch.dtype
) -> str:
    """What was found in the files, and what it is in memory."""
    parameters = f"{spec.num_parameters / 1e6:.0f} M parameters"
    if spec.quantization is None or config.quantization != "none":
        return f"{parameters}, weights as {_name(dtype)}"
    kinds = (weights.code_kind(name) for name in weights.shapes) if ops.keeps_codes else ()
    return f"{parameters}, {in_words(stored_as(path, spec.quantization), kinds)}, other weights as {_name(dtype)}"


def settles_on(device: torch.device) -> bool:
    """Steps are compiled, measured and recorded before the first request. Triton's interpreter has nothing of it."""
    return device.type == "cuda"


def overlapping(runner: LoadedRunner) -> Runner:
    """One that can launch a step while another one runs: a GPU's is so, a CPU's gets a thread of its own. OpenMP keeps
    a team of threads for each thread that computes: from here on it is that one alone, this thread's team sleeps."""
    if isinstance(runner, DeviceRunner):
        return runner
    return ThreadedRunner(runner, partial(torch.set_num_threads, torch.get_num_threads()))


def _keep_kernels(folder: str | None) -> str:
    """What to say while they are compiled. Where they cannot be kept the engine serves all the same."""
    if folder is None:
        return "compiling kernels"
    error = keep_compiled(Path(folder))
    return f"compiling kernels, kept in {folder}" if error is None else f"compiling kernels, not kept: {error}"


def _cache_in_words(num_blocks: int, block_size: int, kv_bytes: int, dtype: torch.dtype) -> str:
    mib = num_blocks * block_size * kv_bytes / 1024**2
    return f"KV cache of {num_blocks} blocks of {block_size} tokens as {_name(dtype)}, {mib:.0f} MiB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
