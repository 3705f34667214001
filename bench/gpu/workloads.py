"""Requests of the engine benches: lengths and random prompts, the same in every run and for every peer."""

from __future__ import annotations

import random
from typing import NamedTuple


class Job(NamedTuple):
    prompt_token_ids: list[int]
    num_output_tokens: int


def nano() -> list[Job]:
    """Return 256 requests with prompts and answers of 100 to 1,024 tokens: 142,827 in, 133,966 out."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10_000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    return [Job(prompt, draw.randint(100, 1024)) for prompt in prompts]


def fixed(num_requests: int, num_prompt_tokens: int, num_output_tokens: int, vocab_size: int = 10_000) -> list[Job]:
    draw = random.Random(1)
    prompts = [[draw.randrange(vocab_size) for _ in range(num_prompt_tokens)] for _ in range(num_requests)]
    return [Job(prompt, num_output_tokens) for prompt in prompts]


def floor_bytes(jobs: list[Job], weight_bytes: int, kv_bytes_per_token: int) -> float:
    """Return the least bytes that decoding must read if all requests run concurrently: the weights once per step, and
    every request's keys and values once per token.
    """
    num_steps = max(job.num_output_tokens for job in jobs)
    contexts = sum(len(job.prompt_token_ids) * job.num_output_tokens + job.num_output_tokens**2 / 2 for job in jobs)
    return num_steps * weight_bytes + contexts * kv_bytes_per_token


def output_tokens(jobs: list[Job]) -> int:
    return sum(job.num_output_tokens for job in jobs)
