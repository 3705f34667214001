"""Combines the runner's capacity and the engine's settings into the scheduler's limits."""

from __future__ import annotations

from pagemill_engine.config import EngineConfig
from pagemill_engine.limits import SchedulerLimits
from pagemill_execution.config import MOST_PROPOSED, StepLimits
from pagemill_execution.runners.base import RunnerInfo


def step_limits(config: EngineConfig, info: RunnerInfo) -> StepLimits:
    """Return the step limits that the runner chose for its device, or else the configured ones."""
    return info.step or config.step


def scheduler_limits(config: EngineConfig, info: RunnerInfo) -> SchedulerLimits:
    """Return the scheduler's limits for an engine with these settings on this runner."""
    step = step_limits(config, info)
    whole_prompts = info.pooling is not None and info.pooling.whole_prompts
    return SchedulerLimits(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=step.max_num_batched_tokens,
        max_num_waiting=config.max_num_waiting,
        max_answer_values=config.max_answer_values,
        policy=config.policy,
        enable_prefix_caching=config.enable_prefix_caching and not whole_prompts,
        # A tokenizer may have tokens beyond the model's vocabulary; those can neither be sampled nor masked.
        eos_token_ids=[token_id for token_id in config.eos_token_ids if token_id < info.vocab_size],
        seed=config.seed,
        weights_digest=info.weights_digest,
        kv_dtype=info.kv_dtype,
        pooling=info.pooling,
        serves_adapters=info.serves_adapters,
        most_jumped=_most_jumped(info),
        kinds=info.kinds,
        kind_blocks=info.kind_blocks,
        shares_memory=info.shares_memory,
    )


def _most_jumped(info: RunnerInfo) -> int:
    """Return as many tokens as have the bits of decodes together with the one before them, so that no bit depends on
    how many were sampled or proposed instead."""
    if not info.jumps_forward:
        return 0
    return min([MOST_PROPOSED, *(rows - 2 for rows in info.rounding_rows)])
