"""What a request would cost on one pod, in milliseconds, from the pod's own step-time model.

The expected time to its first token: the step that runs when it arrives, the wait for a seat or for blocks, and the
steps that the tokens waiting there and its own uncached ones need under the budget. To that comes the harm to the
requests that run there: each of their tokens comes later by what this request adds to their steps.
"""

from __future__ import annotations

from typing import NamedTuple

from pagemill_gateway.routing.pace import Pace
from pagemill_gateway.routing.policy import Candidate, PodReport, RequestView

HARM_SHARE = 0.1
"""What a millisecond by which a running answer falls behind counts against one of waiting for the first token."""


class Terms(NamedTuple):
    step_ms: float
    """Left of the step that runs now."""
    wait_ms: float
    """Until a seat and the blocks are free."""
    prefill_ms: float
    """Steps for the waiting and the uncached tokens."""
    harm_ms: float
    ttft_ms: float
    """What the client waits for: the first three together."""


def expected(request: RequestView, candidate: Candidate, report: PodReport, pace: Pace) -> Terms:
    """`pace`: the pod's own, or that of one like it while the pod has told none."""
    num_running, budget = report.num_running, pace.budget
    num_uncached = max(1, request.num_prompt_tokens - candidate.num_cached_tokens)
    num_ahead = report.num_tokens_waiting + candidate.num_unreported_tokens
    num_full, num_rest = divmod(num_ahead + num_uncached, budget)
    if not num_rest:
        num_full, num_rest = num_full - 1, budget
    products = num_uncached * (num_uncached / 2 + candidate.num_cached_tokens) + num_ahead * num_ahead / 2
    prefill_ms = num_full * pace.full_ms + pace.step_ms(num_rest, products)
    step_ms = 0.0
    if num_running or num_ahead:
        step_ms = pace.full_ms if num_ahead >= budget else pace.step_ms(num_ahead)
    wait_ms = _wait_ms(request, candidate, report, num_uncached, pace.decode_ms)
    token_ms = max(0.0, pace.full_ms - pace.decode_ms) / budget
    harm_ms = HARM_SHARE * num_running * token_ms * (num_uncached + request.num_output_tokens)
    return Terms(step_ms, wait_ms, prefill_ms, harm_ms, step_ms + wait_ms + prefill_ms)


def _wait_ms(
    request: RequestView, candidate: Candidate, report: PodReport, num_uncached: int, decode_ms: float
) -> float:
    """Requests end one after the other: each frees a seat and its share of the blocks."""
    num_before = report.num_running + report.num_waiting + candidate.num_unreported
    if not num_before:
        return 0.0
    answer_ms = request.num_output_tokens * decode_ms
    wait_ms = 0.0
    if 0 < report.max_num_seqs <= num_before:
        wait_ms = (num_before + 1 - report.max_num_seqs) * answer_ms / report.max_num_seqs
    if report.num_blocks_active:
        wanted = (num_uncached + report.num_tokens_waiting + candidate.num_unreported_tokens) // report.block_size + 1
        missing = wanted - report.num_blocks_available
        if missing > 0:
            wait_ms = max(wait_ms, missing * answer_ms / report.num_blocks_active)
    return wait_ms
