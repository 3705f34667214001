"""Plans the memory of a model from sizes and shapes before its weights are read.

It refuses what cannot fit and names the setting to change. `pagemill serve` prints the figures. Measuring memory is
`sizing.memory`'s part; `pagemill_engine.server.fit` is a cheaper check of the files' headers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.sizing.memory import MemoryBudget, MemoryState
from pagemill_execution.weights.errors import LoadError
from pagemill_models.spec.model_spec import ModelSpec

DEFAULT_KV_BYTES = 1024**3
GPU_SHARE = 0.9
"""Share of a GPU's free memory that the plan uses: libraries and allocator fragmentation take some as well."""
SAMPLER_FLOATS = 16
"""Float32 values per request and vocabulary entry when all candidates of a step must be sorted.

They are logits, raw logits and log probabilities, and the sort with its indices, masks and sums.
"""
COUNT_BYTES = 5
"""Bytes per row and vocabulary entry once a request has penalties: a count, and whether the prompt has the token."""
LOGIT_BYTES = 4
"""Bytes per row and vocabulary entry of the copy of the logits that penalties and biases change."""
SCORE_FLOATS = 4
"""Float32 values per attention score that is written out: the score, its bias by distance, and its weight."""
INDEX_BYTES = 128
"""Bytes per token of a step: ids, positions, slots, and the arrays from which they are made."""


class Sizes(NamedTuple):
    """Sizes of one model in memory."""

    weight_bytes: int
    kv_bytes_per_token: int
    item_bytes: int
    """Bytes of an activation value."""
    gathers: bool
    """Whether attention copies the keys and values of a layer together before it reads them."""
    writes_scores: bool = False
    """Whether such attention also writes its scores out, one key/value head of a chunk at a time."""
    adapter_bytes: int = 0
    """All adapters that are kept in memory, each of the largest rank."""
    draft_kv_bytes_per_token: int = 0
    """What a draft model keeps beside each token of the first cache kind, which keeps everything."""
    draft_step_bytes: int = 0
    """What a draft model takes in the largest step: blocks of tokens that may be rejected, and its activations. Its
    weights, keys and values are in the figures above."""


class RankSizes(NamedTuple):
    """The part of a model that one of several processes holds."""

    spec: ModelSpec
    sizes: Sizes


class MeasuredMemory(NamedTuple):
    """Measurements on a device with weights, rows and compiled kernels, but without a KV cache."""

    free_bytes: int
    """Free memory while nothing runs."""
    step_bytes: int
    """The most memory that a step took in addition."""
    graph_bytes: int
    """Memory that recorded decodes will keep."""


class MemoryPlan(NamedTuple):
    num_blocks: int
    budget: MemoryBudget


def plan_memory(
    config: ExecutionConfig, spec: ModelSpec, sizes: Sizes, state: MemoryState, ranks: Sequence[RankSizes] = ()
) -> MemoryPlan:
    """Size the KV cache. Raises `LoadError` if it, the weights and the largest step do not fit together.

    `ranks`: the parts of several processes that share this memory; `sizes` are those of all together.
    """
    if sizes.weight_bytes > state.available_bytes:
        more = _more_memory(state)
        raise LoadError(
            "ModelTooLarge",
            f"The weights take {_gib(sizes.weight_bytes)}, but {_gib(state.available_bytes)} of memory are free, of "
            f"{_gib(state.limit_bytes)} allowed. {more[0].upper()}{more[1:]}, or use a smaller or "
            "quantized model, or a 2-byte dtype.",
        )
    if sizes.adapter_bytes > state.available_bytes - sizes.weight_bytes:
        raise LoadError(
            "ModelTooLarge",
            f"{config.max_cpu_loras or config.max_loras} adapters of rank {config.max_lora_rank} take up to "
            f"{_gib(sizes.adapter_bytes)} beside {_gib(sizes.weight_bytes)} of weights, but "
            f"{_gib(state.available_bytes)} of memory are free. Lower max_loras, max_cpu_loras or max_lora_rank, or "
            f"{_more_memory(state)}.",
        )
    block_bytes = sizes.kv_bytes_per_token * config.block_size
    num_blocks = config.num_kv_blocks
    if keeps_nothing(spec):
        num_blocks = accounting_blocks(config, spec)
    if num_blocks is None:
        default_bytes = _default_kv_bytes(config, spec, sizes, state)
        if state.is_gpu and config.kv_cache_memory_bytes is None and default_bytes < block_bytes:
            step_bytes = activation_bytes(config, spec, sizes, spec.max_position_embeddings)
            raise _step_too_large(config, (sizes.weight_bytes, step_bytes, 0), state)
        num_blocks = _num_blocks(config, block_bytes, default_bytes)
    cache_tokens = num_blocks * config.block_size
    activations = activation_bytes(config, spec, sizes, cache_tokens)
    if ranks:
        activations = _rank_bytes(config, ranks, state, cache_tokens)
    activations += sizes.draft_step_bytes
    return _plan(config, num_blocks, sizes, state, activations, measured=False)


def _rank_bytes(config: ExecutionConfig, ranks: Sequence[RankSizes], state: MemoryState, cache_tokens: int) -> int:
    """Return what the steps of all ranks take together, with the processes of all but the first, which samples, and
    with what they exchange."""
    steps = sum(
        activation_bytes(config, spec, sizes, cache_tokens, samples=number == 0)
        for number, (spec, sizes) in enumerate(ranks)
    )
    sets = 2 * (config.tensor_parallel_size > 1) + (config.pipeline_parallel_size > 1)
    exchanged = sets * len(ranks) * config.step.max_num_batched_tokens * ranks[0].spec.hidden_size * 4
    if config.tensor_parallel_size > 1:
        exchanged += config.step.max_num_seqs * ranks[0].spec.vocab_size * 4  # logits, of which each writes a part
    return steps + (len(ranks) - 1) * state.process_bytes + exchanged


def plan_measured(
    config: ExecutionConfig, spec: ModelSpec, sizes: Sizes, before: MemoryState, measured: MeasuredMemory
) -> MemoryPlan:
    """Size the KV cache from measured steps. `before`: the device's memory without the engine.

    Raises `LoadError` if nothing, or less than the settings ask for, is left for the KV cache.
    """
    held = before.available_bytes - measured.free_bytes - sizes.weight_bytes
    penalties = config.step.max_num_seqs * spec.vocab_size * (COUNT_BYTES + LOGIT_BYTES)
    activations = max(0, held) + measured.step_bytes + measured.graph_bytes + penalties
    block_bytes = sizes.kv_bytes_per_token * config.block_size
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        left_bytes = int(before.available_bytes * GPU_SHARE) - sizes.weight_bytes - activations
        if config.kv_cache_memory_bytes is None and left_bytes < block_bytes:
            raise _step_too_large(config, (sizes.weight_bytes, activations, 0), before)
        num_blocks = _num_blocks(config, block_bytes, left_bytes)
    return _plan(config, num_blocks, sizes, before, activations, measured=True)


def _plan(
    config: ExecutionConfig, num_blocks: int, sizes: Sizes, state: MemoryState, activations: int, *, measured: bool
) -> MemoryPlan:
    """Return the plan for `num_blocks`. Raises `LoadError` if it does not fit."""
    budget = MemoryBudget(
        limit_bytes=state.limit_bytes,
        process_bytes=state.process_bytes,
        other_bytes=state.limit_bytes - state.available_bytes - state.process_bytes,
        weight_bytes=sizes.weight_bytes,
        adapter_bytes=sizes.adapter_bytes,
        kv_bytes=num_blocks * sizes.kv_bytes_per_token * config.block_size,
        activation_bytes=activations,
        measured=measured,
    )
    _check(config, budget, state)
    return MemoryPlan(num_blocks, budget)


def activation_bytes(
    config: ExecutionConfig, spec: ModelSpec, sizes: Sizes, cache_tokens: int, *, samples: bool = True
) -> int:
    """Return the peak bytes of the largest step, without weights and cache, from the model's shapes."""
    num_tokens = config.step.max_num_batched_tokens
    num_rows = min(config.step.max_num_seqs, num_tokens)
    context_tokens = min(config.max_model_len or spec.max_position_embeddings, cache_tokens)
    attentions = list(spec.decoder.attentions())
    heads = max((2 * each.num_heads + 2 * each.num_kv_heads) * each.head_dim for each in attentions)
    layer = 2 * spec.hidden_size + max(heads, 3 * spec.intermediate_size) + max(each.head_dim for each in attentions)
    forward = num_tokens * (layer * sizes.item_bytes + INDEX_BYTES)
    if sizes.gathers:
        gathered_tokens = min(num_rows * context_tokens, cache_tokens)
        forward += gathered_tokens * sizes.kv_bytes_per_token // spec.num_layers
        forward += num_tokens * context_tokens * sizes.item_bytes  # the mask of a chunk with a context
        if sizes.writes_scores:
            of_chunks = num_tokens * context_tokens * max(each.num_heads // each.num_kv_heads for each in attentions)
            of_decodes = gathered_tokens * max(each.num_heads for each in attentions)
            forward += SCORE_FLOATS * 4 * max(of_chunks, of_decodes)
    num_proposed = 0 if config.speculative.method == "off" else config.speculative.num_tokens
    forward += _state_bytes(num_tokens, num_rows, config.block_size + num_proposed, spec)
    if spec.pooling is not None:
        return forward
    if not samples:
        return max(forward, num_rows * spec.vocab_size * 2 * 4)  # its logits, and those of all ranks
    sampling = num_rows * (spec.vocab_size * SAMPLER_FLOATS * 4 + spec.hidden_size * sizes.item_bytes)
    rows = config.step.max_num_seqs * (spec.vocab_size * COUNT_BYTES + context_tokens * 4)
    return max(forward, sampling) + rows


def _state_bytes(num_tokens: int, num_rows: int, log_tokens: int, spec: ModelSpec) -> int:
    """Return what the largest recurrent layer of a step takes: copies of the rows' states, and for each group of a
    block the triangular system with its sides and their products. `log_tokens`: most that a row has logged."""
    num_places = num_tokens + num_rows * log_tokens
    sizes = (
        3 * num_rows * each.cache.num_values
        + num_places * (8 * (each.channels + each.cache.inputs_per_token) + 4 * log_tokens * each.num_value_heads)
        for each in spec.decoder.recurrent()
    )
    return 4 * max(sizes, default=0)


def _default_kv_bytes(config: ExecutionConfig, spec: ModelSpec, sizes: Sizes, state: MemoryState) -> int:
    """Return the default size of the KV cache in bytes.

    A machine's memory is shared with other processes. A GPU's belongs to the engine: the cache takes what is left.
    """
    left_bytes = max(0, state.available_bytes - sizes.weight_bytes - sizes.adapter_bytes)
    if not state.is_gpu:
        return min(DEFAULT_KV_BYTES, left_bytes // 4)
    largest_step = activation_bytes(config, spec, sizes, spec.max_position_embeddings)
    return int(state.available_bytes * GPU_SHARE) - sizes.weight_bytes - largest_step


def _num_blocks(config: ExecutionConfig, block_bytes: int, default_bytes: int) -> int:
    memory_bytes = config.kv_cache_memory_bytes
    if memory_bytes is None:
        memory_bytes = default_bytes
    if memory_bytes < block_bytes:
        raise LoadError(
            "KVCacheTooSmall",
            f"kvCacheMemory is {memory_bytes} bytes, but one block of {config.block_size} tokens takes {block_bytes}. "
            "Raise kvCacheMemory.",
        )
    return memory_bytes // block_bytes


def _check(config: ExecutionConfig, budget: MemoryBudget, state: MemoryState) -> None:
    if budget.free_bytes >= 0:
        return
    free = f"but {_gib(state.available_bytes)} of memory are free"
    if budget.weight_bytes + budget.kv_bytes > state.available_bytes:
        raise LoadError(
            "KVCacheTooLarge",
            f"The weights take {_gib(budget.weight_bytes)} and {_kv_setting(config, budget.kv_bytes)}, {free}. "
            f"Lower kvCacheMemory or {_more_memory(state)}.",
        )
    raise _step_too_large(config, (budget.weight_bytes, budget.activation_bytes, budget.kv_bytes), state)


def _step_too_large(config: ExecutionConfig, sizes_bytes: tuple[int, int, int], state: MemoryState) -> LoadError:
    """Return the error of a step that does not fit. `sizes_bytes`: of the weights, the step and the KV cache."""
    weight_bytes, step_bytes, kv_bytes = sizes_bytes
    step = config.step
    return LoadError(
        "StepTooLarge",
        f"The largest step, maxNumBatchedTokens {step.max_num_batched_tokens} and maxNumSeqs {step.max_num_seqs}, "
        f"takes {_gib(step_bytes)} beside {_gib(weight_bytes)} of weights and {_gib(kv_bytes)} of KV cache, but "
        f"{_gib(state.available_bytes)} of memory are free. Lower maxNumSeqs, maxNumBatchedTokens or kvCacheMemory, or "
        f"{_more_memory(state)}.",
    )


def _more_memory(state: MemoryState) -> str:
    """Return the remedy. A GPU has memory of its own, which no setting of the pod makes larger."""
    return "take a GPU with more memory (resources.gpuProduct)" if state.is_gpu else "raise resources.memory"


def _kv_setting(config: ExecutionConfig, kv_bytes: int) -> str:
    if config.num_kv_blocks is not None:
        return f"num_kv_blocks {config.num_kv_blocks} asks for {_gib(kv_bytes)}"
    return f"kvCacheMemory asks for {_gib(kv_bytes)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB"


def keeps_nothing(spec: ModelSpec) -> bool:
    """Whether no later step reads a key or value, because prompts are computed whole."""
    return not any(heads for heads, _ in spec.cache_shapes)


def accounting_blocks(config: ExecutionConfig, spec: ModelSpec) -> int:
    """Return the number of blocks of a model without a KV cache: as many as all running prompts can need.

    These blocks take no memory; scheduler and gateways count tokens in work by them.
    """
    longest = min(config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
    return config.step.max_num_seqs * -(-longest // config.block_size)
