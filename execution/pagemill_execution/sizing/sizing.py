"""Computes a model's sizes in a device's memory from the headers of its files.

`preparing` asks for the device that computes; `pagemill plan` also for a device that is not present. `budget` sizes the
KV cache and decides whether everything fits.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.sizing.budget import RankSizes, Sizes, activation_bytes
from pagemill_execution.sizing.compute import (
    Compute,
    check_by_transformers,
    check_gpu_features,
    check_pooled,
    check_recurrent,
    choose_compute,
)
from pagemill_execution.sizing.draft import DraftModel, find_draft, is_left_out, scratch_blocks
from pagemill_execution.sizing.kv_sizes import kv_bytes_per_token
from pagemill_execution.sizing.rank_parts import rank_sizes, stages_of
from pagemill_execution.weights.declared import DeclaredWeights
from pagemill_execution.weights.early_digest import EarlyDigest
from pagemill_execution.weights.opening import open_weights, shape_only_weights
from pagemill_execution.weights.quantized import QuantizedWeights
from pagemill_execution.weights.source import WeightSource
from pagemill_kernels.arrays import NUMPY_TYPES, FloatType
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_kernels.registry import WeightForms, weight_forms
from pagemill_models.files.safetensors_header import lacks_weights
from pagemill_models.sharding.slices import Range
from pagemill_models.spec.model_spec import ModelSpec

logger = logging.getLogger(__name__)


class StorageForms(NamedTuple):
    """The storage of weights, keys and values by a backend's kernels."""

    dtype: FloatType
    """Type of float weights."""
    activation_dtype: FloatType
    kv_dtype: KVType
    weights: WeightForms
    attention_gathers: bool
    attention_writes_scores: bool = False
    packs_adapters: bool = True
    """Whether adapters are kept in bfloat16 panels, and not as float32 tensors."""


def storage_forms(compute: Compute) -> StorageForms:
    return StorageForms(
        dtype=compute.dtype,
        activation_dtype=compute.activation_dtype,
        kv_dtype=compute.kv_dtype,
        weights=compute.weight_forms,
        attention_gathers=compute.attention_gathers,
        attention_writes_scores=compute.attention_writes_scores,
        packs_adapters=compute.is_native or compute.backend == "triton",
    )


def gpu_storage_forms(config: ExecutionConfig) -> StorageForms:
    """Return how Triton kernels store a model on any NVIDIA device; `sizing.compute` chooses the same on a real one."""
    dtype: FloatType = "bfloat16" if config.dtype == "auto" else config.dtype
    return StorageForms(
        dtype=dtype,
        activation_dtype=dtype,
        kv_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        weights=weight_forms("triton"),
        attention_gathers=False,
    )


def sizes_here(config: ExecutionConfig, path: Path, spec: ModelSpec) -> Sizes:
    """Return the sizes on this machine, on the configured device. Raises `LoadError`."""
    compute = choose_compute(config, spec)
    return _sizes(config, path, spec, storage_forms(compute), on_gpu=compute.backend == "triton")


def ranks_here(config: ExecutionConfig, path: Path, spec: ModelSpec) -> list[RankSizes]:
    """Return what each of several processes on this machine holds; none for one process. Raises `LoadError`."""
    if config.num_ranks == 1:
        return []
    compute = choose_compute(config, spec)
    return _rank_sizes(config, path, spec, storage_forms(compute), on_gpu=compute.backend == "triton")


def ranks_on_gpu(config: ExecutionConfig, path: Path, spec: ModelSpec) -> list[RankSizes]:
    """Return what each of several NVIDIA devices holds, which need not be present. Raises `LoadError`."""
    return _rank_sizes(config, path, spec, gpu_storage_forms(config), on_gpu=True)


def _rank_sizes(
    config: ExecutionConfig, path: Path, spec: ModelSpec, storage: StorageForms, *, on_gpu: bool
) -> list[RankSizes]:
    weights = _weights(config, path, spec, storage)
    first, *others = parts_of_ranks(config, weights, spec, storage)[1]
    return [first._replace(sizes=_drafting(first.sizes, config, path, spec, on_gpu=on_gpu)), *others]


def parts_of_ranks(
    config: ExecutionConfig, weights: WeightSource, spec: ModelSpec, storage: StorageForms
) -> tuple[list[Range], list[RankSizes]]:
    """Return the layers of each stage, and what each of several ranks holds. Raises `LoadError`."""
    if config.num_ranks == 1:
        return [(0, spec.num_layers)], []
    stages = stages_of(config, spec)
    return stages, rank_sizes(config, stages, weights, spec, lambda own, part: sizes_of(config, own, part, storage))


def sizes_on_gpu(config: ExecutionConfig, path: Path, spec: ModelSpec) -> Sizes:
    """Return the sizes on an NVIDIA device, which need not be present. Raises `LoadError`."""
    on_device = msgspec.structs.replace(config, device="cuda")
    if spec.pooling is not None:
        check_pooled(on_device, spec)
    check_recurrent(on_device, spec)
    if spec.decoder.by_transformers:
        check_by_transformers(on_device, spec)
    check_gpu_features(config, spec)
    return _sizes(config, path, spec, gpu_storage_forms(config), on_gpu=True)


def _sizes(
    config: ExecutionConfig, path: Path, spec: ModelSpec, storage: StorageForms, *, on_gpu: bool = False
) -> Sizes:
    sizes = sizes_of(config, _weights(config, path, spec, storage), spec, storage)
    return _drafting(sizes, config, path, spec, on_gpu=on_gpu)


def _drafting(sizes: Sizes, config: ExecutionConfig, path: Path, spec: ModelSpec, *, on_gpu: bool) -> Sizes:
    """Return the sizes with what drafts, if anything does; of several ranks the first one does."""
    # The device need not be present: what drafts is stored in its forms wherever it is looked at.
    draft = find_draft(msgspec.structs.replace(config, device="cpu") if on_gpu else config, path, spec)
    if draft is None or (on_gpu and is_left_out(config, spec)):
        return sizes
    of_draft = gpu_storage_forms(draft.config) if on_gpu else storage_forms(draft.compute)
    return with_draft(sizes, draft, config, spec, of_draft)


def _weights(config: ExecutionConfig, path: Path, spec: ModelSpec, storage: StorageForms) -> WeightSource:
    small_floats = storage.weights.small_floats
    if path.is_dir() and lacks_weights(path):
        return _rounded(config, path, spec, shape_only_weights(path, spec, small_floats))
    return weights_of(config, path, spec, small_floats)


def with_draft(
    sizes: Sizes, draft: DraftModel, config: ExecutionConfig, spec: ModelSpec, storage: StorageForms
) -> Sizes:
    """Return the sizes of a model and its draft model together. `config`, `spec`: of the model; `storage`: of what
    drafts."""
    own = _sizes(draft.config, draft.path, draft.spec, storage)
    for each in draft.further:
        further = _sizes(each.config, each.path, each.spec, storage)
        own = own._replace(
            weight_bytes=own.weight_bytes + further.weight_bytes,
            kv_bytes_per_token=own.kv_bytes_per_token + further.kv_bytes_per_token,
        )
    if config.num_ranks > 1 and draft.asks_target:  # rank 0 has the model's embedding and head whole
        table = draft.spec.decoder.embedding
        whole = 2 * table.num_rows * table.size * NUMPY_TYPES[storage.dtype].itemsize
        own = own._replace(weight_bytes=own.weight_bytes + whole)
    in_scratch = own.kv_bytes_per_token
    if config.num_ranks == 1 and (spec.has_states or any(spec.decoder.windows())):
        in_scratch += sizes.kv_bytes_per_token  # memory moves between kinds: these are whole blocks of the first one
    scratch_bytes = config.step.max_num_seqs * scratch_blocks(config) * config.block_size * in_scratch
    return sizes._replace(
        weight_bytes=sizes.weight_bytes + own.weight_bytes,
        kv_bytes_per_token=sizes.kv_bytes_per_token + own.kv_bytes_per_token,
        draft_kv_bytes_per_token=own.kv_bytes_per_token,
        draft_step_bytes=scratch_bytes + activation_bytes(draft.config, draft.spec, own, config.block_size),
    )


def sizes_of(config: ExecutionConfig, weights: WeightSource, spec: ModelSpec, storage: StorageForms) -> Sizes:
    return Sizes(
        weight_bytes=_weight_bytes(weights, spec, storage, config.quantization != "none"),
        kv_bytes_per_token=kv_bytes_per_token(spec, storage.kv_dtype),
        item_bytes=NUMPY_TYPES[storage.activation_dtype].itemsize,
        gathers=storage.attention_gathers,
        writes_scores=storage.attention_writes_scores,
        adapter_bytes=_adapter_bytes(config, spec, storage) if config.enable_lora else 0,
    )


def _adapter_bytes(config: ExecutionConfig, spec: ModelSpec, storage: StorageForms) -> int:
    from pagemill_execution.adapters.starting import adapter_bytes  # imports readers of files, as adapters need

    return adapter_bytes(config, spec.decoder, packed=storage.packs_adapters)


def weights_of(
    config: ExecutionConfig,
    path: Path,
    spec: ModelSpec,
    keeps_small_floats: bool,
    early_digest: EarlyDigest | None = None,
) -> WeightSource:
    """Return the stored weights, or weights that are quantized while they are read. Raises `LoadError`."""
    stored = open_weights(path, early_digest, spec.decoder.stacked, keeps_small_floats)
    unused = next((name for name in stored.shapes if name.startswith(spec.decoder.ignored_layers)), None)
    if unused is not None and not spec.decoder.mtp:
        logger.info("`%s` has layers that draft tokens (`%s`), which are not used.", path, unused)
    return _rounded(config, path, spec, DeclaredWeights(stored, spec.decoder))


def _rounded(config: ExecutionConfig, path: Path, spec: ModelSpec, weights: WeightSource) -> WeightSource:
    if config.quantization == "none":
        return weights
    quantized = QuantizedWeights(weights, config.quantization, spec.decoder)
    if quantized.rounds_any:
        return quantized
    logger.warning(
        "quantization=%s changes nothing: `%s` is quantized already (%s) and stays as it is.",
        config.quantization, path, spec.quantization,
    )  # fmt: skip
    return weights


def _weight_bytes(weights: WeightSource, spec: ModelSpec, storage: StorageForms, rounded: bool) -> int:
    """Return the bytes of the weights.

    A tied embedding is a second copy where the quantized output head cannot be read row by row.
    """
    if spec.decoder.by_transformers:
        return weights.num_bytes(storage.activation_dtype, keep_stored=False)
    held = weights.num_bytes(storage.dtype, keep_stored=_keeps_stored(spec, storage, rounded))
    entry = spec.decoder.embedding
    twice = spec.tie_word_embeddings and spec.decoder.embeds and not storage.weights.rows
    return held + (entry.num_rows * entry.size * NUMPY_TYPES[storage.dtype].itemsize if twice else 0)


def _keeps_stored(spec: ModelSpec, storage: StorageForms, rounded: bool) -> bool:
    return storage.weights.bfloat16 or (storage.weights.codes and (rounded or spec.quantization is not None))
