"""Computes the scheduler's load for routers and autoscalers; it is published after every step."""

from __future__ import annotations

from collections.abc import Collection

from pagemill_engine.kv.block_pool import BlockPool
from pagemill_engine.scheduler.sequence import Sequence
from pagemill_protocol.state import EngineLoad


def engine_load(
    pool: BlockPool,
    running: Collection[Sequence],
    num_waiting: int,
    queued_tokens: int,
    num_preemptions: int,
    num_low_priority: int,
    step_ms: float,
) -> EngineLoad:
    """Return the load of an engine. `queued_tokens`: tokens that waiting sequences have yet to compute."""
    running_tokens, prefilling_tokens, prefilled_tokens, num_prefilling = 0, 0, 0, 0
    for sequence in running:
        running_tokens += sequence.num_computed_tokens
        if (due := len(sequence.token_ids) - sequence.num_computed_tokens) > 1:
            prefilling_tokens += due
            prefilled_tokens += sequence.num_computed_tokens
            num_prefilling += 1
    return EngineLoad(
        num_blocks_total=pool.num_blocks,
        num_blocks_free=pool.num_free - pool.num_evictable,
        num_blocks_evictable=pool.num_evictable,
        num_blocks_active=pool.num_active,
        num_requests_running=len(running),
        num_requests_waiting=num_waiting,
        num_tokens_running=running_tokens,
        num_tokens_waiting=queued_tokens + prefilling_tokens,
        step_ms=step_ms,
        num_requests_prefilling=num_prefilling,
        num_tokens_prefilling=prefilling_tokens,
        num_tokens_prefilled=prefilled_tokens,
        num_preemptions=num_preemptions,
        num_low_priority_requests=num_low_priority,
    )
