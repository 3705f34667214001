"""Builds a GPU runner: weights, KV cache, and all kernels that steps will need.

With Triton's interpreter the device is the CPU.
"""

from __future__ import annotations

from pathlib import Path

import torch

from pagemill_execution.decoders.on_torch.decoder import Decoder
from pagemill_execution.decoders.on_torch.device_rotations import DeviceRotations
from pagemill_execution.decoders.on_torch.filling import load_weights, weight_bytes
from pagemill_execution.decoders.on_torch.heads import HeadLayers
from pagemill_execution.decoders.rope import decoder_tables
from pagemill_execution.runners.base import Runner
from pagemill_execution.runners.device.device_adapters import DeviceAdapters, DeviceTables
from pagemill_execution.runners.device.device_drafter import DeviceDraft, DeviceHead
from pagemill_execution.runners.device.device_kv_cache import DeviceKVCache
from pagemill_execution.runners.device.device_runner import DeviceRunner
from pagemill_execution.runners.torch_model import load_decoder
from pagemill_execution.sizing.compute import Compute
from pagemill_execution.sizing.draft import DraftModel, scratch_blocks
from pagemill_execution.sizing.kv_sizes import CacheBlocks, cache_kinds, max_model_len_for
from pagemill_execution.sizing.sizing import weights_of
from pagemill_execution.starting.compiling import capture_graphs
from pagemill_execution.starting.memory_profiling import CudaMeter, measure_device, profile_memory
from pagemill_execution.starting.preparing import (
    ModelFiles,
    PreparedModel,
    describe_cache,
    prepare,
    refusals,
    runner_info,
)
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu import launch
from pagemill_kernels.gpu.building import use_kernel_cache
from pagemill_kernels.torch_arrays import TORCH_TYPES
from pagemill_servers.process.cgroup import usable_cores
from pagemill_servers.process.malloc import trim_heap

ANY_NUMBER = 1 << 40
"""Placeholder for the number of blocks until it is known."""


def load_on_device(files: ModelFiles, compute: Compute) -> Runner:
    """Return a runner for the GPU. Raises `LoadError`."""
    num_threads = files.config.num_threads or usable_cores()
    torch.set_num_threads(num_threads)
    launch.set_num_threads(num_threads)
    try:
        return _load(files, compute)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            "ModelTooLarge",
            f"The device ran out of memory while `{files.path}` was loaded ({str(error).partition('. ')[0]}). See that "
            "nothing else takes its memory, use a smaller or quantized model, or lower maxNumSeqs or maxModelLen.",
        ) from error


def _load(files: ModelFiles, compute: Compute) -> Runner:
    spec, ops, dtype = files.spec, compute.ops, TORCH_TYPES[compute.activation_dtype]
    compiles = compiles_ahead(ops.device)
    with refusals(files.path):
        prepared = prepare(files, compute, measure_device(ops.device))
        config = prepared.config
        model = Decoder(spec, ops, dtype)
        load_weights(model, prepared.weights)
        trim_heap()
        num_blocks = ANY_NUMBER if compiles else prepared.num_blocks
        cache = cache_kinds(config, spec, compute.kv_dtype, num_blocks, prepared.draft_block_bytes)
        shares_memory = prepared.draft is None  # a draft model has as many blocks as the first kind
        max_model_len = max_model_len_for(config, spec, cache, shares_memory=shares_memory)
        tables = decoder_tables(spec.decoder, max_model_len, prepared.weights)
    if not compiles:
        files.progress("allocating", describe_cache(cache, config.block_size, compute.kv_dtype))
    info = runner_info(prepared, spec, max_model_len, weight_bytes(model), ops.device.type)
    info = info.with_cache(cache, shares_memory=shares_memory)
    counts = (0,) * len(cache.counts) if compiles else cache.counts
    kv_cache = DeviceKVCache(
        spec, counts, config.block_size, compute.kv_dtype, ops.device, cache.kinds, None if shares_memory else 0,
        max_rows=config.step.max_num_seqs, most_proposed=cache.most_proposed,
    )  # fmt: skip
    rotations = DeviceRotations(tables, dtype, ops.device)
    adapters = None
    if config.enable_lora:
        from pagemill_execution.adapters.starting import make_store

        store = make_store(config, spec.decoder, prepared.weights, natively=False)
        info = info._replace(serves_adapters=True, adapters=store)
        slots = DeviceTables(spec.decoder, config.max_loras, config.max_lora_rank, dtype, ops.device)
        adapters = DeviceAdapters(store, slots, config.step.max_num_seqs)
    draft = None
    if prepared.draft is not None:
        draft = load_device_draft(prepared.draft, prepared, model, max_model_len)
        draft.resize(counts[0], config.step.max_num_seqs)
        info = info._replace(drafts=True, weight_bytes=info.weight_bytes + weight_bytes(draft.model))
    runner = DeviceRunner(model, ops, kv_cache, rotations, info, config.step.max_num_seqs, adapters, draft=draft)
    if compiles:
        _profile_memory(runner, files, prepared)
    return runner


def load_device_draft(
    draft: DraftModel, prepared: PreparedModel, target: Decoder, max_model_len: int, whole: Decoder | None = None
) -> DeviceDraft:
    """Load what drafts for `target`, without blocks for its cache. `whole`: of `DeviceHead`."""
    spec, compute, config = draft.spec, draft.compute, prepared.config
    ops, dtype = compute.ops, TORCH_TYPES[compute.activation_dtype]
    with refusals(draft.path):
        weights = weights_of(draft.config, draft.path, spec, compute.weight_forms.small_floats)
        if spec.decoder.reads is None:
            model: Decoder | DeviceHead = load_decoder(spec, compute, weights)
        else:
            whole = target if whole is None else whole
            layers = HeadLayers(spec, ops, dtype, weights, whole.embed)
            model = DeviceHead(layers, target, whole, draft.token_ids)
        tables = decoder_tables(spec.decoder, max_model_len, weights)
    cache = DeviceKVCache(spec, (0,), config.block_size, compute.kv_dtype, ops.device)
    return DeviceDraft(model, cache, DeviceRotations(tables, dtype, ops.device), scratch_blocks(prepared.config))


def _profile_memory(runner: DeviceRunner, files: ModelFiles, prepared: PreparedModel) -> None:
    config, spec = prepared.config, files.spec
    files.progress("warming", kept_kernels(config.kernel_cache_dir))
    draft_bytes = prepared.draft_block_bytes
    profile_memory(runner, config, spec, prepared.sizes, prepared.before, CudaMeter(), draft_block_bytes=draft_bytes)
    cache = CacheBlocks(runner.info.kinds, runner.info.blocks_of_kinds)
    files.progress("allocating", describe_cache(cache, config.block_size, prepared.compute.kv_dtype))
    if config.cuda_graphs:
        files.progress("warming", "recording steps")
        capture_graphs(runner, config, spec)


def compiles_ahead(device: torch.device) -> bool:
    """Whether steps are compiled, measured and recorded before the first request.

    Triton's interpreter needs none of this.
    """
    return device.type == "cuda"


def kept_kernels(folder: str | None) -> str:
    """Return the progress message of compiling. The engine also works where compiled kernels cannot be kept."""
    if folder is None:
        return "compiling kernels"
    error = use_kernel_cache(Path(folder))
    return f"compiling kernels, kept in {folder}" if error is None else f"compiling kernels, not kept: {error}"
