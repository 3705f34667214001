"""What a request would cost on one pod, in milliseconds, by the pod's own step-time model.

The expected time to its first token: the rest of the step that runs when it arrives, the wait for a sequence slot or
for blocks, and the steps that the tokens waiting there and its own uncached ones need under the budget. Added to that
is the harm to the requests that run there: each of their tokens comes later by what this request adds to their steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagemill_gateway.routing.report import PodReport
from pagemill_gateway.routing.step_time_snapshot import StepTimeSnapshot
from pagemill_protocol.step_time import StepTimePieces

HARM_SHARE = 0.1
"""Weight of a millisecond by which a running answer is delayed, against one of waiting for the first token."""


class CostTerms(NamedTuple):
    step_ms: float
    """Rest of the step that runs now."""
    wait_ms: float
    """Until a sequence slot and the blocks are free."""
    prefill_ms: float
    """Steps for the waiting and the uncached tokens."""
    harm_ms: float

    @property
    def ttft_ms(self) -> float:
        """What the client waits for."""
        return self.step_ms + self.wait_ms + self.prefill_ms


class CostBasis(NamedTuple):
    """What of the cost depends on the pod alone: computed when its state changes, read by every decision."""

    predict_ms: Callable[[int, int, int], float]
    """Its step-time model."""
    num_running: int
    num_context_tokens: int
    num_ahead: int
    """Prompt tokens that are computed first, reported or not."""
    ahead_products: float
    budget: int
    full_ms: float
    step_ms: float
    decode_ms: float
    harm_ms: float
    """Per token."""
    num_over_capacity: int
    """Requests that have to end before a sequence slot is free."""
    max_num_seqs: int
    num_tokens_without_wait: float
    """With fewer tokens ahead, its own included, a request waits for no block."""
    block_size: int
    num_blocks_available: int
    num_blocks_active: int
    pieces: StepTimePieces
    """Of the step-time model."""


def cost_basis_of(
    report: PodReport, snapshot: StepTimeSnapshot, num_unreported: int, num_unreported_tokens: int
) -> CostBasis:
    """`snapshot`: the pod's own, or that of a similar pod while it has reported none."""
    num_running, budget = report.num_running, snapshot.budget
    num_ahead = report.num_tokens_waiting + num_unreported_tokens
    num_before = num_running + report.num_waiting + num_unreported
    num_keeping = num_before - report.num_giving_way
    step_ms = 0.0
    if num_running or num_ahead:
        step_ms = snapshot.full_ms if num_ahead >= budget else snapshot.step_ms(num_ahead)
    waits_for_blocks = num_before > 0 and report.num_blocks_active > 0
    return CostBasis(
        snapshot.model.predict_ms,
        snapshot.num_running,
        snapshot.num_context_tokens,
        num_ahead,
        num_ahead * num_ahead / 2,
        budget,
        snapshot.full_ms,
        step_ms,
        snapshot.decode_ms,
        HARM_SHARE * num_running * (max(0.0, snapshot.full_ms - snapshot.decode_ms) / budget),
        num_keeping + 1 - report.max_num_seqs if 0 < report.max_num_seqs <= num_keeping else 0,
        report.max_num_seqs,
        report.num_blocks_available * report.block_size if waits_for_blocks else math.inf,
        report.block_size,
        report.num_blocks_available,
        report.num_blocks_active,
        snapshot.model.pieces,
    )


def cost_terms(
    bases: Sequence[CostBasis], cached: Sequence[int], num_prompt_tokens: int, num_output_tokens: float
) -> list[tuple[float, float, float, float]]:
    """The four `CostTerms` for each pod, by its basis and its cached tokens.

    In one loop and as plain tuples: every decision computes them for every pod.
    """
    rows = []
    for cost_basis, num_cached in zip(bases, cached, strict=True):
        (
            predict_ms, num_running, num_context_tokens, num_ahead, ahead_products, budget, full_ms, step_ms, decode_ms,
            harm_ms, num_over_capacity, max_num_seqs, num_tokens_without_wait, block_size, num_blocks_available,
            num_blocks_active, _,
        ) = cost_basis  # fmt: skip
        num_uncached = num_prompt_tokens - num_cached
        if num_uncached < 1:
            num_uncached = 1
        num_rest, wait_ms, prefill_ms = num_ahead + num_uncached, 0.0, 0.0
        # Requests end one after the other: each frees a sequence slot and its share of the blocks.
        if num_over_capacity:
            wait_ms = num_over_capacity * (num_output_tokens * decode_ms) / max_num_seqs
        if num_rest >= num_tokens_without_wait:
            num_missing = num_rest // block_size + 1 - num_blocks_available
            wait_ms = max(wait_ms, num_missing * (num_output_tokens * decode_ms) / num_blocks_active)
        if num_rest > budget:
            num_full = (num_rest - 1) // budget
            num_rest -= num_full * budget
            prefill_ms = num_full * full_ms
        products = num_uncached * (num_uncached / 2 + num_cached) + ahead_products
        prefill_ms += predict_ms(num_running + num_rest, num_context_tokens, int(products))
        rows.append((step_ms, wait_ms, prefill_ms, harm_ms * (num_uncached + num_output_tokens)))
    return rows
