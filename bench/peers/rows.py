"""The rows of the comparison: which requests are sent, and what is computed from their times.

Prompts are random ordinary token ids, different in every run (so that no cache of an earlier run has them), of the same
lengths in every run and for every peer. Output lengths are exact, end-of-sequence is ignored, decoding is greedy.
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

from workload import ORDINARY_TOKENS, mixed_workload

from peers.wire import Jobs

Form = Literal["offline", "online", "start"]

SINGLE_PROMPT, SINGLE_OUTPUT = 64, 128
PREFILL_TOKENS = 1024
PREFIX_REQUESTS, PREFIX_SHARED, PREFIX_OWN, PREFIX_OUTPUT = 16, 768, 32, 16
MIXED_REQUESTS = 64
LENGTHS_SEED = 20_240_601


class Row(NamedTuple):
    name: str
    title: str
    form: Form
    clients: int = 0
    """Requests in flight at any time of an online row."""


ROWS = {
    row.name: row
    for row in (
        Row("mixed", "64 mixed prompts at once (in 16-256, out 16-128)", "offline"),
        Row("single", "single stream decode (in 64, out 128)", "offline"),
        Row("prefill", "prefill of 1,024 tokens", "offline"),
        Row("prefix", "16 requests sharing a 768-token prefix", "offline"),
        Row("online-1", "online, 1 client", "online", 1),
        Row("online-8", "online, 8 clients", "online", 8),
        Row("online-32", "online, 32 clients", "online", 32),
        Row("start", "process start to ready", "start"),
    )
}


class Size(NamedTuple):
    """The amount of work; the quick size only tries the harness, and its figures are no result."""

    mixed_requests: int
    online_requests: dict[str, int]
    """Requests of one run, by row."""


FULL = Size(MIXED_REQUESTS, {"online-1": 100, "online-8": 100, "online-32": 100})
QUICK = Size(16, {"online-1": 4, "online-8": 16, "online-32": 32})


def mixed(num_requests: int, run: int) -> Jobs:
    """Return jobs with the lengths of `workload.mixed_workload` in every run, and the run's own tokens."""
    draw = random.Random(f"mixed:{run}")
    return [
        (_tokens(draw, len(job.prompt_token_ids)), job.num_output_tokens)
        for job in mixed_workload(num_requests, seed=LENGTHS_SEED)
    ]


def single(run: int) -> tuple[Jobs, Jobs]:
    """Return the request, and one of the same length that ends with its first token: the difference is pure
    decoding.
    """
    draw = random.Random(f"single:{run}")
    return [(_tokens(draw, SINGLE_PROMPT), SINGLE_OUTPUT)], [(_tokens(draw, SINGLE_PROMPT), 1)]


def prefill(run: int) -> Jobs:
    return [(_tokens(random.Random(f"prefill:{run}"), PREFILL_TOKENS), 1)]


def prefix(run: int) -> Jobs:
    draw = random.Random(f"prefix:{run}")
    shared = _tokens(draw, PREFIX_SHARED)
    return [(shared + _tokens(draw, PREFIX_OWN), PREFIX_OUTPUT) for _ in range(PREFIX_REQUESTS)]


def warm_up() -> Jobs:
    """Return requests to run before any timing, so that every engine has compiled, packed and allocated what it
    needs.
    """
    return [(job.prompt_token_ids, 8) for job in mixed_workload(8, prompt_tokens=(16, 256), seed=1)]


def online(row: Row, num_requests: int, run: int) -> Jobs:
    """Return jobs with the lengths of the mixed workload; longer lists begin with the shorter ones."""
    draw = random.Random(f"{row.name}:{run}")
    return [
        (_tokens(draw, len(job.prompt_token_ids)), job.num_output_tokens)
        for job in mixed_workload(num_requests, seed=LENGTHS_SEED + 1 + run)
    ]


def _tokens(draw: random.Random, num: int) -> list[int]:
    return [draw.choice(ORDINARY_TOKENS) for _ in range(num)]
