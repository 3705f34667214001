"""Sizes of the KV cache before it exists: bytes per token, the longest request that it allows, and its refusal.

The arrays are `executing.kv_cache`'s part.
"""

from __future__ import annotations

from typing import NamedTuple

from pagemill_engine.config import EngineConfig
from pagemill_engine.sizing.budget import keeps_nothing
from pagemill_engine.weights.errors import LoadError
from pagemill_kernels.kv_store.kinds import KVType, token_bytes
from pagemill_models.spec.model_spec import ModelSpec, kinds_of
from pagemill_protocol.report.cache_kinds import CacheKind, split_blocks


class CacheBlocks(NamedTuple):
    kinds: tuple[CacheKind, ...]
    counts: tuple[int, ...]
    """Blocks of each kind."""

    @property
    def num_bytes(self) -> int:
        return sum(count * kind.block_bytes for count, kind in zip(self.counts, self.kinds, strict=True))


def kv_bytes_per_token(spec: ModelSpec, kind: KVType) -> int:
    """Return the bytes of keys and values, or latents, of one token in all layers, including scales."""
    return sum(heads * token_bytes(kind, size) for heads, size in spec.cache_shapes)


def cache_kinds(config: EngineConfig, spec: ModelSpec, kind: KVType, num_blocks: int) -> CacheBlocks:
    """Divide the memory of `num_blocks` blocks of all layers among the cache kinds of the model."""
    size, step_tokens = config.block_size, config.step.max_num_batched_tokens
    longest = min(config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
    kinds = kinds_of(spec.decoder, size, lambda values: token_bytes(kind, values), longest)
    found, counts = split_blocks(kinds, num_blocks, longest, step_tokens, size)
    return CacheBlocks(tuple(found), tuple(counts))


def max_model_len_for(config: EngineConfig, spec: ModelSpec, num_blocks: int) -> int:
    """Return how many tokens one request may have.

    Raises `LoadError` if the setting asks for more than the model or the cache allows.
    """
    cache_tokens = num_blocks * config.block_size
    wanted = config.max_model_len
    if keeps_nothing(spec):
        return _whole_prompts_for(config, spec)
    if wanted is None:
        return min(spec.max_position_embeddings, cache_tokens)
    if wanted > spec.max_position_embeddings:
        raise LoadError(
            "MaxModelLenTooLarge",
            f"maxModelLen is {wanted}, but the model was made for {spec.max_position_embeddings} tokens. "
            "Lower maxModelLen.",
        )
    if wanted > cache_tokens:
        raise LoadError(
            "MaxModelLenTooLarge",
            f"maxModelLen is {wanted}, but the KV cache holds {cache_tokens} tokens ({num_blocks} blocks of "
            f"{config.block_size}). Lower maxModelLen or raise kvCacheMemory.",
        )
    return wanted


def _whole_prompts_for(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the longest request of a model whose steps compute whole prompts. Raises `LoadError`."""
    most, step_tokens = spec.max_position_embeddings, config.step.max_num_batched_tokens
    wanted = config.max_model_len
    if wanted is None:
        return min(most, step_tokens)
    if wanted > min(most, step_tokens):
        limit, remedy = (most, "Lower maxModelLen") if wanted > most else (step_tokens, "Raise maxNumBatchedTokens")
        what = "the model was made for" if wanted > most else "its prompts are computed whole, and a step may have"
        raise LoadError("MaxModelLenTooLarge", f"maxModelLen is {wanted}, but {what} {limit} tokens. {remedy}.")
    return wanted


def too_large(num_blocks: int, block_size: int, num_bytes: int) -> LoadError:
    return LoadError(
        "KVCacheTooLarge",
        f"The KV cache of {num_blocks} blocks of {block_size} tokens takes {num_bytes / 1024**3:.1f} GiB, "
        "more memory than this machine, container or device has. Lower kvCacheMemory.",
    )
