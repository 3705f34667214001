"""What a model will take of the memory there is, planned from sizes and shapes before its weights are read.

Refuses what cannot fit with the setting to change. The figures are printed by `pagemill serve`. Measures nothing itself
(`runner.memory`); a cheaper look, at the files' headers alone, is `server.fit`.
"""

from __future__ import annotations

from typing import NamedTuple

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import MemoryBudget
from pagemill_engine.loading.errors import LoadError
from pagemill_engine.runner.memory import MemoryState
from pagemill_protocol.model_spec import ModelSpec

DEFAULT_KV_BYTES = 1024**3
GPU_SHARE = 0.9
"""Share of a GPU's free memory that is planned with: libraries and allocator fragmentation take some as well."""
SAMPLER_FLOATS = 16
"""Float32 values per request and vocabulary entry when all candidates of a step must be sorted: logits, raw logits and
log probabilities, and the sort with its indices, masks and sums."""
COUNT_BYTES = 5
"""For every row and token of the vocabulary, once a request has penalties: its count, and whether the prompt has it."""
LOGIT_BYTES = 4
"""For every row and token of the vocabulary: the copy of the logits that penalties and biases change."""
SCORE_FLOATS = 4
"""For every score that attention writes out: the score, what lowers it with distance, and the weight it becomes."""
INDEX_BYTES = 128
"""For every token of a step: ids, positions, slots and the arrays on the way to them."""


class Sizes(NamedTuple):
    """Sizes of one model in memory."""

    weight_bytes: int
    kv_bytes_per_token: int
    item_bytes: int
    """Bytes of a computed value."""
    gathers: bool
    """Attention copies the keys and values of a layer together before it reads them."""
    writes_scores: bool = False
    """And it writes its scores out, those of a key/value head of a chunk at a time."""


class Measured(NamedTuple):
    """Measured on a device that holds weights, rows and compiled kernels, but no KV cache yet."""

    free_bytes: int
    """While nothing runs."""
    step_bytes: int
    """What a step took at most, beside them."""
    recording_bytes: int
    """What recorded decodes will take for themselves."""


class MemoryPlan(NamedTuple):
    num_blocks: int
    budget: MemoryBudget


def plan_memory(config: EngineConfig, spec: ModelSpec, sizes: Sizes, state: MemoryState) -> MemoryPlan:
    """Size the KV cache. Raises `LoadError` when it, the weights and the largest step do not fit together."""
    if sizes.weight_bytes > state.available_bytes:
        more = _more_memory(state)
        raise LoadError(
            "ModelTooLarge",
            f"The weights take {_gib(sizes.weight_bytes)}, but {_gib(state.available_bytes)} of memory are free, of "
            f"{_gib(state.limit_bytes)} allowed. {more[0].upper()}{more[1:]}, or use a smaller or "
            "quantized model, or a 2-byte dtype.",
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
    activations = activation_bytes(config, spec, sizes, num_blocks * config.block_size)
    return _plan(config, num_blocks, sizes, state, activations, measured=False)


def plan_measured(
    config: EngineConfig, spec: ModelSpec, sizes: Sizes, before: MemoryState, measured: Measured
) -> MemoryPlan:
    """As `plan_memory`, once the steps were run. `before`: the device without the engine.

    Raises `LoadError` when nothing, or not what is asked for, is left for the KV cache.
    """
    held = before.available_bytes - measured.free_bytes - sizes.weight_bytes
    penalties = config.step.max_num_seqs * spec.vocab_size * (COUNT_BYTES + LOGIT_BYTES)
    activations = max(0, held) + measured.step_bytes + measured.recording_bytes + penalties
    block_bytes = sizes.kv_bytes_per_token * config.block_size
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        left_bytes = int(before.available_bytes * GPU_SHARE) - sizes.weight_bytes - activations
        if config.kv_cache_memory_bytes is None and left_bytes < block_bytes:
            raise _step_too_large(config, (sizes.weight_bytes, activations, 0), before)
        num_blocks = _num_blocks(config, block_bytes, left_bytes)
    return _plan(config, num_blocks, sizes, before, activations, measured=True)


def _plan(
    config: EngineConfig, num_blocks: int, sizes: Sizes, state: MemoryState, activations: int, *, measured: bool
) -> MemoryPlan:
    """Raises `LoadError` where it does not fit together."""
    budget = MemoryBudget(
        limit_bytes=state.limit_bytes,
        process_bytes=state.process_bytes,
        other_bytes=state.limit_bytes - state.available_bytes - state.process_bytes,
        weight_bytes=sizes.weight_bytes,
        kv_bytes=num_blocks * sizes.kv_bytes_per_token * config.block_size,
        activation_bytes=activations,
        measured=measured,
    )
    _check(config, budget, state)
    return MemoryPlan(num_blocks, budget)


def activation_bytes(config: EngineConfig, spec: ModelSpec, sizes: Sizes, cache_tokens: int) -> int:
    """The most that the largest step holds at a time beside weights and cache, from the model's shapes."""
    num_tokens = config.step.max_num_batched_tokens
    num_rows = min(config.step.max_num_seqs, num_tokens)
    context_tokens = min(config.max_model_len or spec.max_position_embeddings, cache_tokens)
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = 2 * spec.hidden_size + max(heads, 3 * spec.intermediate_size) + spec.head_dim
    forward = num_tokens * (layer * sizes.item_bytes + INDEX_BYTES)
    if sizes.gathers:
        gathered_tokens = min(num_rows * context_tokens, cache_tokens)
        forward += gathered_tokens * sizes.kv_bytes_per_token // spec.num_layers
        forward += num_tokens * context_tokens * sizes.item_bytes  # the mask of a chunk with a context
        if sizes.writes_scores:
            of_chunks = num_tokens * context_tokens * (spec.num_heads // spec.num_kv_heads)
            forward += SCORE_FLOATS * 4 * max(of_chunks, gathered_tokens * spec.num_heads)
    if spec.pooling is not None:
        return forward
    sampling = num_rows * (spec.vocab_size * SAMPLER_FLOATS * 4 + spec.hidden_size * sizes.item_bytes)
    rows = config.step.max_num_seqs * (spec.vocab_size * COUNT_BYTES + context_tokens * 4)
    return max(forward, sampling) + rows


def _default_kv_bytes(config: EngineConfig, spec: ModelSpec, sizes: Sizes, state: MemoryState) -> int:
    """A machine's memory is shared with others; a GPU's is the engine's: the cache takes what nothing else needs."""
    room_bytes = state.available_bytes - sizes.weight_bytes
    if not state.is_gpu:
        return min(DEFAULT_KV_BYTES, room_bytes // 4)
    largest_step = activation_bytes(config, spec, sizes, spec.max_position_embeddings)
    return int(state.available_bytes * GPU_SHARE) - sizes.weight_bytes - largest_step


def _num_blocks(config: EngineConfig, block_bytes: int, default_bytes: int) -> int:
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


def _check(config: EngineConfig, budget: MemoryBudget, state: MemoryState) -> None:
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


def _step_too_large(config: EngineConfig, sizes_bytes: tuple[int, int, int], state: MemoryState) -> LoadError:
    """`sizes_bytes`: of the weights, the step and the KV cache."""
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
    """A GPU has its own, which no setting of the pod makes larger."""
    return "take a GPU with more memory (resources.gpuProduct)" if state.is_gpu else "raise resources.memory"


def _kv_setting(config: EngineConfig, kv_bytes: int) -> str:
    if config.num_kv_blocks is not None:
        return f"num_kv_blocks {config.num_kv_blocks} asks for {_gib(kv_bytes)}"
    return f"kvCacheMemory asks for {_gib(kv_bytes)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB"


def keeps_nothing(spec: ModelSpec) -> bool:
    """Prompts are computed whole: no key and no value is read by a later step."""
    return spec.cache_heads == 0


def accounting_blocks(config: EngineConfig, spec: ModelSpec) -> int:
    """Blocks without memory, for a model that keeps nothing: as many as all prompts under way can have. Scheduler and
    gateways count tokens in work by them."""
    longest = min(config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
    return config.step.max_num_seqs * -(-longest // config.block_size)
