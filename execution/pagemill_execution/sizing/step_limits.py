"""Chooses the limits of a GPU's step where the settings leave them open.

This is decided only here: the engine asks before it loads, `pagemill plan` for a device that need not be present. A
larger step uses the device better, but takes memory from the KV cache and time from the requests that decode in it.
Devices are distinguished by their memory.
"""

from __future__ import annotations

import msgspec

from pagemill_execution.config import CPU_STEP, ExecutionConfig, StepLimits
from pagemill_execution.sizing.budget import GPU_SHARE, Sizes, activation_bytes, keeps_nothing
from pagemill_execution.sizing.memory import MemoryState
from pagemill_models.spec.model_spec import ModelSpec

GIB = 1024**3
GPU_STEPS = (
    (36 * GIB, StepLimits(256, 8192)),
    (14 * GIB, StepLimits(128, 2048)),
    (0, StepLimits(64, 1024)),
)
"""Step limits by memory: data-center cards from A100 40 GB and L40S on; L4, A10 and cards of 16 to 32 GB; smaller ones.

Of 24 GB some 22 can be used, and a prompt of 8,192 tokens would delay decodes there for seconds.
"""
ENCODER_TOKENS = 2048
"""Tokens of a step of whole prompts: no decode waits for it, and few long prompts would fill a smaller one badly."""
STEP_SHARE = 0.25
"""Largest share of the memory without the weights for the largest step; the rest is for keys and values."""


def choose_step_limits(config: ExecutionConfig, spec: ModelSpec, sizes: Sizes, state: MemoryState) -> ExecutionConfig:
    """Return `config` with the step limits of this device; configured limits are kept."""
    if keeps_nothing(spec):
        longest = min(config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
        return _with(config, CPU_STEP._replace(max_num_batched_tokens=max(ENCODER_TOKENS, longest)))
    if not state.is_gpu:
        return _with(config, CPU_STEP)
    usual = next(step for memory_bytes, step in GPU_STEPS if state.limit_bytes >= memory_bytes)
    budget_bytes = _step_budget_bytes(config, sizes, state)
    while usual != CPU_STEP and _step_bytes(_with(config, usual), spec, sizes) > budget_bytes:
        usual = StepLimits(*(max(least, most // 2) for least, most in zip(CPU_STEP, usual, strict=True)))
    # A step's requests cannot have more tokens than their contexts together.
    context_tokens = _with(config, usual).step.max_num_seqs * (config.max_model_len or spec.max_position_embeddings)
    return _with(config, usual._replace(max_num_batched_tokens=min(usual.max_num_batched_tokens, context_tokens)))


def _with(config: ExecutionConfig, usual: StepLimits) -> ExecutionConfig:
    return msgspec.structs.replace(config, **config.step_with_defaults(usual)._asdict())


def _step_budget_bytes(config: ExecutionConfig, sizes: Sizes, state: MemoryState) -> int:
    """Return the bytes that the largest step may take."""
    left_bytes = int(state.available_bytes * GPU_SHARE) - sizes.weight_bytes
    if config.num_kv_blocks is not None:
        return left_bytes - config.num_kv_blocks * config.block_size * sizes.kv_bytes_per_token
    if config.kv_cache_memory_bytes is not None:
        return left_bytes - config.kv_cache_memory_bytes
    return int(left_bytes * STEP_SHARE)


def _step_bytes(config: ExecutionConfig, spec: ModelSpec, sizes: Sizes) -> int:
    return activation_bytes(config, spec, sizes, spec.max_position_embeddings)
