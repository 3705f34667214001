"""Log probabilities of prompts: decides which ones a step has to report.

Positions that an earlier step reported are not reported again when they are computed again (after a preemption, or by
another choice that takes over). Positions that were not reported have to be computed, whatever the prefix cache
contains. The runner computes the values.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagemill_engine.scheduler.sequence import Sequence
from pagemill_engine.scheduler.step import PromptTargets, StepPlan


def reusable_blocks(sequence: Sequence, block_size: int) -> int | None:
    """Return how many cached blocks the sequence may reuse; None means all of them."""
    if sequence.reads_all:
        return 0
    report = sequence.prompt_report
    if report is None or report.num_reported == sequence.num_prompt_tokens - 1:
        return None
    return report.num_reported // block_size


def prompt_targets(plan: StepPlan, reporting: Mapping[str, Sequence]) -> dict[str, PromptTargets]:
    """Return the prompt tokens that `plan` has to report, by request id.

    Call this before the plan's tokens count as computed.
    """
    found = {}
    for name, sequence in reporting.items():
        num_tokens = plan.num_scheduled_tokens.get(name)
        if num_tokens is None or sequence.prompt_report is None:
            continue
        start, report = sequence.num_computed_tokens, sequence.prompt_report
        first = max(start, report.num_reported)
        end = min(start + num_tokens, sequence.num_prompt_tokens - 1)
        if first < end:
            token_ids = sequence.token_ids[first + 1 : end + 1]
            found[name] = PromptTargets(first, first - start, token_ids, report.num_top)
    return found
