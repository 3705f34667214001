"""Builds a CPU runner: threads, weights, KV cache.

The native decoder runs without torch; other models run on torch, which is imported here.
"""

from __future__ import annotations

from functools import partial

from pagemill_execution.decoders.native.decoder import NativeDecoder
from pagemill_execution.decoders.native.head import NativeHead
from pagemill_execution.decoders.rope import Rotations, decoder_tables
from pagemill_execution.decoders.step_model import StepModel, TargetModel
from pagemill_execution.runners.base import Runner
from pagemill_execution.runners.eager import EagerRunner, ThreadedRunner
from pagemill_execution.runners.kv_cache import KVCache
from pagemill_execution.runners.pooling import Pooler, PoolingRunner
from pagemill_execution.runners.row_adapters import row_adapters
from pagemill_execution.sizing.budget import keeps_nothing
from pagemill_execution.sizing.compute import Compute
from pagemill_execution.sizing.draft import DraftModel, scratch_blocks
from pagemill_execution.sizing.kv_sizes import cache_kinds, kv_bytes_per_token, max_model_len_for
from pagemill_execution.sizing.memory import measure_memory
from pagemill_execution.sizing.sizing import weights_of
from pagemill_execution.starting.load_encoder import load_encoder
from pagemill_execution.starting.preparing import (
    ModelFiles,
    PreparedModel,
    describe_cache,
    prepare,
    refusals,
    runner_info,
)
from pagemill_execution.starting.threads import threads_of_ranks, torch_threads
from pagemill_execution.weights.source import WeightSource
from pagemill_kernels.arrays import Array
from pagemill_kernels.cpu import launch
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_servers.process.malloc import trim_heap


def load_on_cpu(files: ModelFiles, compute: Compute) -> Runner:
    """Return a runner for the CPU. Raises `LoadError`."""
    (num_threads,) = threads_of_ranks(files.config)
    launch.set_num_threads(num_threads)
    prepare_thread = torch_threads(compute, num_threads)
    with refusals(files.path):
        prepared = prepare(files, compute, measure_memory())
        if prepared.draft is not None:
            prepare_thread = torch_threads(prepared.draft.compute, num_threads) or prepare_thread
        runner = _runner(files, prepared)
    # torch's OpenMP keeps a team of threads for each computing thread. From here on only the runner's team works.
    return ThreadedRunner(runner, prepare_thread) if files.config.overlap else runner


def _runner(files: ModelFiles, prepared: PreparedModel) -> Runner:
    config, compute, spec, num_blocks = prepared.config, prepared.compute, files.spec, prepared.num_blocks
    draft = prepared.draft
    cache = cache_kinds(config, spec, compute.kv_dtype, num_blocks, prepared.draft_block_bytes)
    shares_memory = len(cache.kinds) > 1
    max_model_len = max_model_len_for(config, spec, cache, shares_memory=shares_memory)
    if keeps_nothing(spec):
        return load_encoder(prepared, spec, max_model_len)
    model = _native(prepared, spec, max_model_len) if compute.is_native else _torch(files, prepared, max_model_len)
    trim_heap()
    files.progress("allocating", describe_cache(cache, config.block_size, compute.kv_dtype))
    info = runner_info(prepared, spec, max_model_len, model.num_bytes, "cpu")
    info = info.with_cache(cache, shares_memory=shares_memory)
    kv_type = compute.kv_dtype
    max_rows = config.step.max_num_seqs
    kv_cache = KVCache(
        spec, cache.counts, config.block_size, kv_type, cache.kinds, shares_memory=shares_memory, max_rows=max_rows,
        most_proposed=cache.most_proposed, blocks_beyond=0 if draft is None else max_rows * scratch_blocks(config),
    )  # fmt: skip
    if spec.pooling is None:
        adapters = None
        if config.enable_lora:
            from pagemill_execution.adapters.starting import make_store

            store = make_store(config, spec.decoder, prepared.weights, natively=compute.is_native)
            info = info._replace(serves_adapters=True, adapters=store)
            adapters = row_adapters(store, spec.decoder, config.step.max_num_seqs, natively=compute.is_native)
        if draft is None:
            return EagerRunner(model, kv_cache, info, config.step.max_num_seqs, adapters)
        drafting = load_draft(files, prepared, draft, kv_cache, max_model_len, model)
        draft_bytes = sum(each.num_bytes for each, _ in drafting)
        info = info._replace(drafts=True, weight_bytes=info.weight_bytes + draft_bytes)
        return EagerRunner(model, kv_cache, info, config.step.max_num_seqs, adapters, drafting)
    return PoolingRunner(model, kv_cache, info, config.step.max_num_seqs, Pooler(spec.pooling, model.classifier))


def load_draft(
    files: ModelFiles,
    prepared: PreparedModel,
    draft: DraftModel,
    kv_cache: KVCache,
    max_model_len: int,
    target: TargetModel,
) -> list[tuple[StepModel, KVCache]]:
    """Load what drafts for `target`, a model or its heads. `kv_cache`: of `target`, in whose first kind's blocks theirs
    are if memory moves between its kinds."""
    num_blocks = kv_cache.of_kinds[0].num_blocks
    num_blocks += prepared.config.step.max_num_seqs * scratch_blocks(prepared.config)
    found, start = [], 0
    for each in (draft, *draft.further):
        end = start + kv_bytes_per_token(each.spec, each.compute.kv_dtype) * each.config.block_size
        within = partial(_part, kv_cache, start, end) if kv_cache.beside.size else None
        model, spec = _drafting(files, prepared, each, max_model_len, target), each.spec
        found.append((model, KVCache(spec, num_blocks, each.config.block_size, each.compute.kv_dtype, within=within)))
        start = end
    return found


def _part(kv_cache: KVCache, start: int, end: int) -> Array:
    return kv_cache.beside[:, start:end]


def _drafting(
    files: ModelFiles,
    prepared: PreparedModel,
    draft: DraftModel,
    max_model_len: int,
    target: TargetModel,
) -> StepModel:
    config, spec, compute = draft.config, draft.spec, draft.compute
    with refusals(draft.path):
        weights = weights_of(config, draft.path, spec, compute.weight_forms.small_floats)
        own = prepared._replace(config=config, compute=compute, weights=weights)
        drafted = files._replace(config=config, path=draft.path, spec=spec)
        if spec.decoder.reads is not None:
            return _head(draft, weights, max_model_len, target)
        if compute.is_native:
            return _native(own, spec, max_model_len)
        return _torch(drafted, own, max_model_len)


def _head(draft: DraftModel, weights: WeightSource, max_model_len: int, target: TargetModel) -> StepModel:
    if draft.compute.is_native:
        return NativeHead(draft.spec, draft.compute.native_ops, weights, max_model_len, target, draft.token_ids)
    from pagemill_execution.runners.torch_head import TorchHead

    return TorchHead(draft.spec, draft.compute, weights, max_model_len, target, draft.token_ids)


def _native(prepared: PreparedModel, spec: ModelSpec, max_model_len: int) -> TargetModel:
    weights = prepared.weights
    rotations = Rotations(decoder_tables(spec.decoder, max_model_len, weights))
    return NativeDecoder(spec, prepared.compute.native_ops, weights, rotations)


def _torch(files: ModelFiles, prepared: PreparedModel, max_model_len: int) -> TargetModel:
    from pagemill_execution.runners.torch_model import load_torch_model

    return load_torch_model(files.path, files.spec, prepared.compute, prepared.weights, max_model_len)
