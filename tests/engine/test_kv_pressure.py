"""With more requests than the KV cache can hold, answers stay the same, none is lost, and repeated work is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

BLOCK_SIZE = 4
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 10, 70
WANTED_BLOCKS = NUM_REQUESTS * -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE)
"""The number of blocks for all requests at once, to their ends."""


def serve(make: Callable[..., Any], num_blocks: int, policy: str) -> tuple[dict[str, list[int]], EngineCore]:
    runner = make(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=100, vocab_size=50)
    config = EngineConfig(
        model="m",
        block_size=BLOCK_SIZE,
        policy=policy,  # type: ignore[arg-type]
        max_num_batched_tokens=64,
    )
    core = EngineCore(config, runner)
    for index in range(NUM_REQUESTS):
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=index)
        prompt = [(index + position) % 50 for position in range(PROMPT_TOKENS)]
        core.add(
            GenerateRequest(
                request_id=f"r{index}", model="m", prompt_token_ids=prompt, sampling=sampling, priority=index % 3
            )
        )
    answers: dict[str, list[int]] = {}
    while core.has_work:
        for out in core.step().outputs:
            assert out.error is None
            answers.setdefault(out.request_id, []).extend(out.token_ids)
        core.check_integrity()
    return answers, core


@pytest.mark.slow_for("1.5-priority", "4.0-fcfs", "2.0-fcfs")
@pytest.mark.sample("1.0-fcfs", "1.5-priority", "2.0-fcfs", "2.0-shortest*", "4.0-*")
@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prefill-first"])
@pytest.mark.parametrize("oversubscription", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_oversubscribed_caches_give_the_same_answers(
    checking_runner: Callable[..., Any], policy: str, oversubscription: float
) -> None:
    plenty, _ = serve(checking_runner, 2 * WANTED_BLOCKS, "fcfs")
    pressed, core = serve(checking_runner, int(WANTED_BLOCKS / oversubscription), policy)
    assert pressed == plenty
    assert all(len(answer) == OUTPUT_TOKENS for answer in pressed.values())
    assert (core.scheduler.num_preemptions > 0) == (oversubscription > 1)
    assert core.load().num_kv_bytes_active == 0
    # A preempted row computes its tokens again: without a limit on new rows, the same work would be repeated many
    # times.
    num_computed = sum(plan.num_tokens for plan in core.runner.plans)  # type: ignore[attr-defined]
    num_needed = NUM_REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS - 1)
    assert num_computed <= 2 * num_needed
