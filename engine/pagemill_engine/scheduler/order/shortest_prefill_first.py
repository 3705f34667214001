"""Short prompts first, which minimises the mean time to first token.

Plain shortest-job-first starves long jobs. Here each prompt token counts as an arrival `TOKEN_MS` milliseconds later: a
prompt of 4,096 tokens waits for shorter ones that arrive within 8 seconds after it, and for no others. Prompts in the
middle of their prefill are ranked the same way: a short prompt is computed between two chunks of a long one.
"""

from __future__ import annotations

from pagemill_engine.scheduler.sequence import Sequence

TOKEN_MS = 2


def rank(request: Sequence) -> tuple[int, ...]:
    return (round(1000 * request.arrival_s) + request.num_prompt_tokens * TOKEN_MS, request.arrival, request.choice)
