"""Requests that are drawn at random and together use what plans can contain: forks, beams, reports, priorities."""

from __future__ import annotations

import random

from pagemill_engine.config import EngineConfig
from pagemill_execution.config import SpeculationConfig
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import LOW_PRIORITY, SamplingParams

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48


def a_config(draw: random.Random, overlap: bool) -> EngineConfig:
    return EngineConfig(
        model="m",
        block_size=BLOCK_SIZE,
        eos_token_ids=[10],
        max_num_seqs=draw.randint(1, 6),
        max_num_batched_tokens=draw.randint(1, 40),
        enable_prefix_caching=draw.random() < 0.8,
        policy=draw.choice(["fcfs", "priority", "shortest-prefill-first"]),
        overlap=overlap,
        speculative=SpeculationConfig(method="off"),
    )


def a_request(draw: random.Random, index: int, shared: list[int]) -> GenerateRequest:
    prompt = shared[: draw.randint(0, 24)] + [draw.randint(0, 1) for _ in range(draw.randint(1, 6))]
    kind, seed = draw.choice(["plain", "plain", "plain", "n", "beams", "best_of", "report"]), draw.randint(0, 3)
    width = draw.randint(1, 4)
    if kind == "beams":
        prompt = prompt[:6]
        sampling = SamplingParams(
            n=draw.randint(1, width), best_of=width, use_beam_search=True, max_tokens=draw.randint(1, 10)
        )
    elif kind == "best_of":
        sampling = SamplingParams(n=draw.randint(1, width), best_of=width, max_tokens=draw.randint(1, 12), seed=seed)
    elif kind == "report":
        sampling = SamplingParams(prompt_logprobs=1, logprobs=2, max_tokens=draw.randint(1, 8), seed=seed)
    else:
        n = draw.randint(2, 3) if kind == "n" else 1
        sampling = SamplingParams(n=n, max_tokens=draw.choice([None, draw.randint(1, 20)]), seed=seed)
    return GenerateRequest(
        request_id=f"r{index}",
        model="m",
        prompt_token_ids=prompt,
        sampling=sampling,
        priority=draw.choice([0, 0, 1, 2, LOW_PRIORITY]),
    )
