"""Requests of the engine benches, the same in every run and for every peer, and the least work that they take."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

from pagemill_models.declaration.caches import StateSpec
from pagemill_models.spec.model_spec import STATE_VALUE_BYTES, ModelSpec

BYTES = 2
"""Of a bfloat16 value."""


class Job(NamedTuple):
    prompt_token_ids: list[int]
    num_output_tokens: int


def nano() -> list[Job]:
    """Return 256 requests with prompts and answers of 100 to 1,024 tokens: 142,827 in, 133,966 out."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10_000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    return [Job(prompt, draw.randint(100, 1024)) for prompt in prompts]


def fixed(
    num_requests: int, num_prompt_tokens: int, num_output_tokens: int, vocab_size: int = 10_000, seed: int = 1
) -> list[Job]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(vocab_size) for _ in range(num_prompt_tokens)] for _ in range(num_requests)]
    return [Job(prompt, num_output_tokens) for prompt in prompts]


def floor_bytes(jobs: list[Job], weight_bytes: float, kv_bytes_per_token: int) -> float:
    """Return the least bytes that decoding must read if all requests run concurrently: the weights once per step, and
    every request's keys and values once per token.
    """
    num_steps = max(job.num_output_tokens for job in jobs)
    contexts = sum(len(job.prompt_token_ids) * job.num_output_tokens + job.num_output_tokens**2 / 2 for job in jobs)
    return num_steps * weight_bytes + contexts * kv_bytes_per_token


def output_tokens(jobs: list[Job]) -> int:
    return sum(job.num_output_tokens for job in jobs)


def kv_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a token's keys and values in bfloat16."""
    return 2 * BYTES * spec.num_layers * spec.num_kv_heads * spec.head_dim


def read_bytes(config: dict[str, Any], spec: ModelSpec, num_rows: int) -> float:
    """Return the bytes of weights that a step of so many decodes reads; experts are chosen at random.

    An embedding that is not the head as well is looked up, not read.
    """
    return BYTES * _parameters(config, spec, lambda share: 1 - (1 - share) ** num_rows)


def state_bytes(spec: ModelSpec) -> float:
    """Return the bytes of recurrent states that a decode of one request reads, and writes in each sixteenth step."""
    states = (cache for _, cache in spec.decoder.caches() if isinstance(cache, StateSpec))
    return (1 + 1 / 16) * STATE_VALUE_BYTES * sum(cache.num_values for cache in states)


def prefill_flops(config: dict[str, Any], spec: ModelSpec, num_tokens: int) -> float:
    """Return the operations of a prompt: two for each weight that a token meets, and attention to all tokens before it.

    The head computes one row.
    """
    head = spec.vocab_size * spec.hidden_size
    weights = _parameters(config, spec, lambda share: share) - head
    attention = 2 * num_tokens**2 * spec.num_layers * spec.num_heads * spec.head_dim
    return 2 * num_tokens * weights + 2 * head + attention


def _parameters(config: dict[str, Any], spec: ModelSpec, read: Any) -> float:
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    share = read(config["num_experts_per_tok"] / num_experts) if num_experts else 1.0
    total = 0.0
    for name, shape in spec.decoder.shapes().items():
        if "embed_tokens" in name and not config["tie_word_embeddings"]:
            continue
        total += math.prod(shape) * (share if ".experts." in name else 1.0)
    return total
