"""Decisions before any runner is built: data types, memory, step limits.

`load_cpu` and `load_device` continue from here. Does not import torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.decoders.errors import UnsupportedModelError, WeightsError
from pagemill_execution.decoders.fitting import check_depth
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.sizing.budget import Sizes, plan_memory
from pagemill_execution.sizing.compute import Compute
from pagemill_execution.sizing.draft import DraftModel, find_draft
from pagemill_execution.sizing.kv_sizes import CacheBlocks
from pagemill_execution.sizing.memory import MemoryBudget, MemoryState
from pagemill_execution.sizing.rank_parts import together
from pagemill_execution.sizing.sizing import parts_of_ranks, sizes_of, storage_forms, weights_of, with_draft
from pagemill_execution.sizing.step_limits import choose_step_limits
from pagemill_execution.weights.codes import describe_codes
from pagemill_execution.weights.early_digest import EarlyDigest
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.opening import stored_as
from pagemill_execution.weights.source import WeightSource
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_models.sharding.slices import Range
from pagemill_models.sources import default_name
from pagemill_models.spec.model_spec import ModelSpec

Progress = Callable[[str, str], None]


class ModelFiles(NamedTuple):
    """The model to load, and the callback for progress."""

    config: ExecutionConfig
    path: Path
    spec: ModelSpec
    progress: Progress
    early_digest: EarlyDigest | None = None


TEXT_ONLY = ", text only"
"""Said of models whose files also hold encoders."""


class PreparedModel(NamedTuple):
    config: ExecutionConfig
    """The configuration with step limits."""
    compute: Compute
    weights: WeightSource
    sizes: Sizes
    before: MemoryState
    """Memory of the device before the weights were loaded."""
    num_blocks: int
    budget: MemoryBudget
    stages: list[Range]
    """The layers of each stage of a pipeline."""
    draft: DraftModel | None = None

    @property
    def draft_block_bytes(self) -> int:
        """What a draft model keeps beside each block of the first kind."""
        return self.sizes.draft_kv_bytes_per_token * self.config.block_size


def prepare(
    files: ModelFiles, compute: Compute, before: MemoryState, others: Sequence[MemoryState] = ()
) -> PreparedModel:
    """Choose types, step limits and sizes. Raises `LoadError`, and the errors that `refusals` converts.

    `others`: the memory of further nodes, whose ranks come behind those of this one.
    """
    config, spec = files.config, files.spec
    weights = weights_of(config, files.path, spec, compute.weight_forms.small_floats, files.early_digest)
    if not spec.decoder.by_transformers:
        check_depth(spec.decoder, weights.shapes)
    storage = storage_forms(compute)
    stages, ranks = parts_of_ranks(config, weights, spec, storage)
    # Ranks of CPUs share the memory of their node; each GPU has its own.
    whole, here = sizes_of(config, weights, spec, storage), ranks[: 1 if before.is_gpu else config.ranks_here]
    sizes = together(whole, here)
    draft = find_draft(config, files.path, spec)
    if draft is not None:
        sizes = with_draft(sizes, draft, config, spec, storage_forms(draft.compute))
    config = choose_step_limits(config, spec, sizes, before)
    num_blocks, budget = plan_memory(config, spec, sizes, before, here)
    for number, state in enumerate(others, start=1):  # the node with the least room decides
        there = ranks[number * config.ranks_here :][: config.ranks_here]
        try:
            found, _ = plan_memory(config, spec, together(whole, there), state, there)
        except LoadError as error:
            raise LoadError(error.reason, f"Node {number}: {error.message}") from error
        if found < num_blocks:
            limited = msgspec.structs.replace(config, num_kv_blocks=found)
            num_blocks, budget = plan_memory(limited, spec, sizes, before, here)
    how = f"{compute.how}{TEXT_ONLY if spec.decoder.text_only else ''}"
    files.progress("loading", f"{default_name(config.model)}: {_held(files, compute, weights)}, {how}")
    return PreparedModel(config, compute, weights, sizes, before, num_blocks, budget, stages, draft)


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn the faults of a model's files into `LoadError`s."""
    try:
        yield
    except UnsupportedModelError as error:
        raise LoadError("UnsupportedArchitecture", f"`{path}`: {error}") from error
    except WeightsError as error:
        raise LoadError("ModelUnreadable", f"`{path}`: {error}") from error


def runner_info(
    prepared: PreparedModel, spec: ModelSpec, max_model_len: int, weight_bytes: int, device: str
) -> RunnerInfo:
    config, compute = prepared.config, prepared.compute
    return RunnerInfo(
        num_blocks=prepared.num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        weights_digest=prepared.weights.digest(),
        kv_dtype=compute.kv_dtype,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=prepared.sizes.kv_bytes_per_token,
        compute=f"{compute.dtype}, {compute.how}{TEXT_ONLY if spec.decoder.text_only else ''}",
        device=device,
        memory=msgspec.structs.replace(prepared.budget, weight_bytes=weight_bytes),
        step=config.step,
        pooling=spec.pooling,
        rounding_rows=compute.rounding_rows,
    )


def describe_cache(cache: CacheBlocks, block_size: int, kind: KVType) -> str:
    counts = [str(count) for count in cache.counts]
    if len(counts) > 1:
        counts = [f"{count} {each.name}" for count, each in zip(cache.counts, cache.kinds, strict=True)]
    blocks = f"{' and '.join(counts)} blocks of {block_size} tokens"
    return f"KV cache of {blocks} as {kind}, {cache.num_bytes / 1024**2:.0f} MiB"


def _held(files: ModelFiles, compute: Compute, weights: WeightSource) -> str:
    """Return a description of the weights in the files and in memory."""
    spec, dtype = files.spec, compute.dtype
    parameters = f"{spec.num_parameters / 1e6:.0f} M parameters"
    if spec.quantization is None or files.config.quantization != "none":
        return f"{parameters}, weights as {dtype}"
    kinds = (weights.code_kind(name) for name in weights.shapes) if compute.weight_forms.codes else ()
    return f"{parameters}, {describe_codes(stored_as(files.path, spec.quantization), kinds)}, other weights as {dtype}"
