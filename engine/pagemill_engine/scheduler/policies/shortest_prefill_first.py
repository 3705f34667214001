"""Short prompts first, which makes the mean time to first token the least: each token counts as a later arrival.

Shortest job first lets long jobs starve; here a prompt of 4,096 tokens waits for shorter ones that arrive within 8
seconds after it, and for no others. Prompts in the middle of their prefill are ranked alike: a short one is computed
between two chunks of a long one.
"""

from __future__ import annotations

from pagemill_engine.scheduler.request import Request

TOKEN_MS = 2


def rank(request: Request) -> tuple[int, ...]:
    return (round(1000 * request.arrival_s) + request.num_prompt_tokens * TOKEN_MS, request.arrival, request.choice)
