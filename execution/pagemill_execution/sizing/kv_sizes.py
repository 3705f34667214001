"""Sizes of the KV cache before it exists: bytes per token, its division among cache kinds, the longest request that it
allows, and its refusal. Engine and planner divide memory here only.

The arrays are `runners.kv_cache`'s part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pagemill_execution.config import ExecutionConfig, SpeculationConfig, StepLimits
from pagemill_execution.sizing.budget import keeps_nothing
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.kv_store.kinds import ITEM_BYTES, KVType, token_bytes
from pagemill_models.declaration.caches import StateSpec
from pagemill_models.spec.model_spec import STATE_VALUE_BYTES, ModelSpec, kinds_of
from pagemill_protocol.report.cache_kinds import (
    ANY_LENGTH,
    CacheKind,
    most_held,
    most_of_first,
    one_kind,
    sequence_bytes,
)

USUAL_TOKENS = 4096
"""Tokens of the sequences for which memory is divided among kinds, unless the model's are shorter."""
PROPOSED_SHARE = 8
"""By default proposed tokens of recurrent layers get one part in so many of the cache."""


class CacheBlocks(NamedTuple):
    kinds: tuple[CacheKind, ...]
    counts: tuple[int, ...]
    """Blocks of each kind."""
    most_proposed: int | None = None
    """Proposed tokens of a request for which rows have room; None: for any number, as no layer is recurrent."""

    @property
    def num_bytes(self) -> int:
        return sum(count * kind.block_bytes for count, kind in zip(self.counts, self.kinds, strict=True))


def kv_bytes_per_token(spec: ModelSpec, kind: KVType) -> int:
    """Return the bytes of keys and values, or latents, of one token in all layers, including scales."""
    return sum(heads * token_bytes(kind, size) for heads, size in spec.cache_shapes)


def kv_type_of(spec: ModelSpec, num_bytes: int) -> KVType:
    """Return a type of the cache with which a token has so many bytes; float32 if there is none."""
    return next((kind for kind in ITEM_BYTES if kv_bytes_per_token(spec, kind) == num_bytes), "float32")


def cache_kinds(
    config: ExecutionConfig, spec: ModelSpec, kind: KVType, num_blocks: int, draft_block_bytes: int = 0
) -> CacheBlocks:
    """Divide the memory of `num_blocks` blocks of all attention layers among the cache kinds of the model.

    `draft_block_bytes`: what a draft model keeps beside each block of the first kind, which keeps everything.
    """
    longest = min(config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)

    def kinds_with(most_proposed: int) -> list[CacheKind]:
        kinds = kinds_of(
            spec.decoder, config.block_size, lambda values: token_bytes(kind, values), longest, most_proposed
        )
        if draft_block_bytes:
            kinds[0] = msgspec.structs.replace(kinds[0], block_bytes=kinds[0].block_bytes + draft_block_bytes)
        return kinds

    kinds = kinds_with(0)
    if keeps_nothing(spec):
        return CacheBlocks((one_kind(kinds),), (num_blocks,))
    total = num_blocks * sum(each.block_bytes for each in kinds if not each.state)
    if not kinds[-1].state:
        return divide(kinds, total, longest, config.step, config.block_size)
    least = 0 if config.device == "cpu" else 1
    """On a device logs are rings, in which no token takes the place of one that is read."""
    most_proposed, is_default = most_proposed_of(config, spec, total), config.speculative == SpeculationConfig()
    most_proposed = max(least, most_proposed)
    try:
        divided = divide(kinds_with(most_proposed), total, longest, config.step, config.block_size)
        if is_default:
            max_model_len_for(config, spec, divided, shares_memory=config.num_ranks == 1)
    except LoadError:
        if not is_default:
            raise
        most_proposed = least  # the default refuses nothing
        divided = divide(kinds_with(least), total, longest, config.step, config.block_size)
    return divided._replace(most_proposed=most_proposed)


def most_proposed_of(config: ExecutionConfig, spec: ModelSpec, total: int) -> int:
    """Return for how many proposed tokens of a request the rows of recurrent layers have room, in a cache of `total`
    bytes.

    By default, which proposes only what some clients predict, these take a small part of the cache.
    """
    settings = config.speculative
    if settings.method == "off" or spec.pooling is not None:
        return 0
    if settings != SpeculationConfig():
        return settings.num_tokens
    states = (cache for _, cache in spec.decoder.caches() if isinstance(cache, StateSpec))
    of_token = STATE_VALUE_BYTES * sum(cache.inputs_per_token + cache.channels for cache in states)
    return min(settings.num_tokens, total // PROPOSED_SHARE // (config.step.max_num_seqs * of_token))


def divide(kinds: Sequence[CacheKind], total: int, longest: int, step: StepLimits, block_size: int) -> CacheBlocks:
    """Divide `total` bytes among the kinds of a model whose sequences have up to `longest` tokens.

    Off come what no block of a sequence takes (`bytes_beside`) and the fewest blocks of each kind; the rest is divided
    as decodes of sequences of up to 4,096 tokens need it. If the kinds that keep everything would get fewer blocks than
    without windows, nothing is freed behind windows: all layers with vectors are of one kind. Raises `LoadError`.
    """
    vectors = [kind for kind in kinds if not kind.state]
    plain = [*([one_kind(vectors)] if vectors else ()), *(kind for kind in kinds if kind.state)]
    if len(plain) == 1 and plain[0].keeps_all:
        counts: list[int] | None = [total // plain[0].block_bytes]  # their padding block is not counted
    else:
        counts = _counts(plain, total, longest, step, block_size)
    if len(vectors) > 1:
        freeing = _counts(kinds, total, longest, step, block_size)
        most = counts[0] if counts is not None else 0
        if freeing and all(count >= most for count, kind in zip(freeing, kinds, strict=True) if kind.keeps_all):
            return CacheBlocks(tuple(kinds), tuple(freeing))
    if counts is None:
        raise _too_small(plain, total, longest, step, block_size)
    return CacheBlocks(tuple(plain), tuple(counts))


def bytes_beside(kinds: Sequence[CacheKind], max_num_seqs: int) -> int:
    """Return the bytes that no block of a sequence takes: a padding block of each kind, and the inputs that each
    running sequence has since its last state."""
    return sum(kind.block_bytes + max_num_seqs * kind.row_bytes for kind in kinds)


def fewest_blocks(kind: CacheKind, longest: int, step: StepLimits, block_size: int) -> int:
    """Return the blocks that a kind gets before memory is divided by need.

    Of a window: those of one sequence of `longest` tokens in the largest steps, so that a step's tokens cost decodes
    nothing. Of states: that of one sequence, and one for every 16 running ones, whose next state cannot replace the
    last one.
    """
    if kind.state:
        return 1 + -(-step.max_num_seqs // 16)
    return 0 if kind.keeps_all else most_held(kind, 0, longest, step.max_num_batched_tokens, block_size)


def _counts(
    kinds: Sequence[CacheKind], total: int, longest: int, step: StepLimits, block_size: int
) -> list[int] | None:
    """Return the blocks of each kind, or None if the bytes do not suffice."""
    fewest = [fewest_blocks(kind, longest, step, block_size) for kind in kinds]
    usual = min(longest, USUAL_TOKENS)
    shares = [most_held(kind, 0, usual, 1, block_size) for kind in kinds]
    taken = sum(few * kind.block_bytes for few, kind in zip(fewest, kinds, strict=True))
    rest = total - bytes_beside(kinds, step.max_num_seqs) - taken
    weight = sequence_bytes(kinds, usual, 1, block_size)
    if rest <= 0 or not weight:
        return None
    return [few + rest * share // weight for few, share in zip(fewest, shares, strict=True)]


def _too_small(kinds: Sequence[CacheKind], total: int, longest: int, step: StepLimits, block_size: int) -> LoadError:
    """Return the error of a cache that is too small for one sequence, which names the kind that takes most."""
    sizes = [
        fewest_blocks(kind, longest, step, block_size) * kind.block_bytes + bytes_beside([kind], step.max_num_seqs)
        for kind in kinds
    ]
    taken, name = max((taken, kind.name) for taken, kind in zip(sizes, kinds, strict=True))
    fits = (
        num
        for num in range(step.max_num_seqs, 0, -1)
        if _counts(kinds, total, longest, step._replace(max_num_seqs=num), block_size)
    )
    remedy = f"Lower maxNumSeqs to {num} or raise kvCacheMemory" if (num := next(fits, 0)) else "Raise kvCacheMemory"
    return LoadError(
        "KVCacheTooSmall",
        f"The KV cache has {total} bytes, but `{name}` alone takes {taken} for one request and the rows of "
        f"maxNumSeqs {step.max_num_seqs}. {remedy}.",
    )


def longest_request(cache: CacheBlocks, step_tokens: int, block_size: int) -> tuple[int, int]:
    """Return the most tokens of a request for which every kind has the blocks, and the number of the kind that has
    fewest."""
    most = []
    for kind, count in zip(cache.kinds, cache.counts, strict=True):
        fits = not kind.keeps_all and most_held(kind, 0, ANY_LENGTH, step_tokens, block_size) <= count
        most.append(ANY_LENGTH if fits else count * block_size + (block_size - 1 if kind.state else 0))
    return min(most), most.index(min(most))


def max_model_len_for(
    config: ExecutionConfig, spec: ModelSpec, cache: CacheBlocks, *, shares_memory: bool = False
) -> int:
    """Return how many tokens one request may have. `shares_memory`: whether memory moves between the kinds.

    Raises `LoadError` if the setting asks for more than the model or the cache allows.
    """
    wanted = config.max_model_len
    if keeps_nothing(spec):
        return _whole_prompts_for(config, spec)
    step_tokens = config.step.max_num_batched_tokens
    if shares_memory and len(cache.kinds) > 1:
        most = most_of_first(cache.kinds, cache.counts, step_tokens, config.block_size)
        cache = cache._replace(counts=(most, *cache.counts[1:]))
    cache_tokens, number = longest_request(cache, step_tokens, config.block_size)
    if wanted is None:
        return min(spec.max_position_embeddings, cache_tokens)
    if wanted > spec.max_position_embeddings:
        raise LoadError(
            "MaxModelLenTooLarge",
            f"maxModelLen is {wanted}, but the model was made for {spec.max_position_embeddings} tokens. "
            "Lower maxModelLen.",
        )
    if wanted > cache_tokens:
        name = f"`{cache.kinds[number].name}` " if number else ""
        raise LoadError(
            "MaxModelLenTooLarge",
            f"maxModelLen is {wanted}, but the KV cache holds {cache_tokens} tokens ({cache.counts[number]} {name}"
            f"blocks of {config.block_size}). Lower maxModelLen or raise kvCacheMemory.",
        )
    return wanted


def _whole_prompts_for(config: ExecutionConfig, spec: ModelSpec) -> int:
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
