"""On the CPU's native kernels no bit of an answer depends on how many tokens are proposed, not only if `deterministic`.

The number follows measured times, so an answer that depended on it would depend on the clock. What other requests a
step computes is another matter: it can change how products are rounded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import expert_models
import hybrid_models
import numpy as np
import pytest
from family_models import MODELS, write_model
from oracle_proposer import oracle

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.runners.eager import ThreadedRunner
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

LENGTHS = (3, 18, 70)
SHAPES = MODELS | expert_models.MODELS | hybrid_models.MODELS
FEW = ("gemma2", "qwen3-moe", "qwen3.5")


def served(runner: Any, prompts: list[list[int]], proposals: Proposals | None) -> tuple[list[list[Any]], int]:
    """Return tokens and log probabilities of requests that come one after the other, and the number of steps."""
    inner = runner._inner if isinstance(runner, ThreadedRunner) else runner
    inner._rows.release(list(inner._rows._row_of))
    config = EngineConfig(
        model="m",
        block_size=runner.info.block_size,
        overlap=runner.info.overlaps,
        speculative=SpeculationConfig(method="off"),
    )
    core, answers = EngineCore(config, runner, proposals=proposals), []
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(
            temperature=0.7 * (number % 2), seed=number, max_tokens=40, logprobs=0, ignore_eos=True
        )
        core.add(GenerateRequest(request_id=str(number), model="m", prompt_token_ids=prompt, sampling=sampling))
        answer: list[Any] = []
        while core.has_work:
            for output in core.step().outputs:
                assert output.error is None
                answer += zip(output.token_ids, [each.logprobs[0] for each in output.logprobs or []], strict=True)
        answers.append(answer)
    return answers, core.num_steps


@pytest.mark.parametrize("settings", [{}, {"quantization": "int4"}, {"quantization": "int8", "kv_cache_dtype": "int8"}])
@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(each, marks=pytest.mark.slow) for each in SHAPES if each not in FEW)]
)
def test_no_bit_of_an_answer_depends_on_how_many_tokens_are_proposed(
    name: str, settings: dict[str, Any], tmp_path: Path, runner_loader: Callable[..., Any]
) -> None:
    family, config = SHAPES[name]
    write_model(family, config, tmp_path)
    with closing(runner_loader(tmp_path, dtype="auto", max_num_seqs=4, **settings)) as runner:
        vocab_size = runner.info.vocab_size
        draw = np.random.default_rng(0)
        prompts = [draw.integers(0, vocab_size, length).tolist() for length in LENGTHS]
        plain, num_plain = served(runner, prompts, None)
        texts = [prompt + [token for token, _ in answer] for prompt, answer in zip(prompts, plain, strict=True)]
        for error_rate in (0.0, 0.3):
            method = oracle(texts, random.Random(1), error_rate, vocab_size)
            most, rounding_rows = 16, runner.info.rounding_rows
            proposals = Proposals([method], most, ms_of=lambda *_: 1.0, rounding_rows=rounding_rows)
            found, num_steps = served(runner, prompts, proposals)
            assert found == plain
            assert num_steps < 0.8 * num_plain
