"""All families in all shapes give the greedy answers and prompt log probabilities of transformers.

The requests run whole, in chunks, after prefix hits and after preemption. `make test` runs a sample, `make test-full`
all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_models import ENCODERS
from family_checkpoints import KINDS
from family_matrix import BASES, CASES
from family_models import VOCAB_SIZE, write_model
from greedy_families import LENGTHS, NUM_TOKENS, Family, family_of, prompt_logprobs, tokens_of
from hybrid_models import ALL

from pagemill_kernels.cpu import library
from pagemill_models.declaration.known import BUILT_IN
from pagemill_protocol.request.sampling import SamplingParams

SAMPLE = ("qwen3_moe, heads of 20", "gpt_neox, yarn")
ASKS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0)


def test_every_family_is_in_the_matrix() -> None:
    beyond = {kind.architecture for kind in KINDS.values()}
    others = {module for module, names in BUILT_IN.items() if not beyond & {*names.architectures}}
    classes = {name for name, _ in ALL.values()}
    hybrids = {module for module, names in BUILT_IN.items() if classes & {*names.architectures}}
    assert others - ENCODERS.keys() - hybrids == BASES.keys()


@pytest.fixture(params=[name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in CASES])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    case = CASES[request.param]
    model = write_model(case.architecture, case.overrides, tmp_path)
    return family_of(model, tmp_path, VOCAB_SIZE, case.lengths)


def assert_prompts_have_the_logprobs_of_transformers(family: Family, results: list[Any]) -> None:
    """Check that log probabilities are within 1e-4 and twice the rounding error of transformers.

    The log probabilities of random tokens are tens of nats below 0, and the scores of random models are so large that
    another order of summation may change one token in a hundred by ten times that error.
    """
    over, largest = [], 0.0
    for prompt, result in zip(family.prompts, results, strict=True):
        exact, rounding = prompt_logprobs(family, prompt)
        assert len(result.prompt_logprobs) == len(exact)
        differences = (torch.tensor(result.prompt_logprobs, dtype=torch.float64) - exact).abs()
        over.append(differences > 1e-4 + 2 * rounding + 1e-5 * exact.abs())
        largest = max(largest, float(differences.max()) if len(exact) else 0.0)
    assert float(torch.cat(over).float().mean()) < 0.015
    assert largest < 2e-3


@pytest.mark.slow
def test_answers_equal_transformers_in_chunks_after_prefix_hits_and_preemption(
    family: Family, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    # None is what this machine chooses. Cases of rotary tables, which are shared, have fewer
    # prompts, and run by it alone.
    for backend in (None, "cpu") if library.load() and len(family.prompts) == len(LENGTHS) else (None,):
        driver = make_driver(runner_loader(family.folder, backend=backend))
        asks = [ASKS] * len(family.prompts)
        for settings in ({}, {"max_num_batched_tokens": 13}):
            results = driver.generate(family.prompts, asks, enable_prefix_caching=False, **settings)
            assert tokens_of(results) == family.expected
            assert_prompts_have_the_logprobs_of_transformers(family, results)
        hits = driver.greedy(family.prompts * 2, NUM_TOKENS, waves=True)
        assert tokens_of(hits) == family.expected * 2
        assert sum(result.num_cached_tokens for result in hits[len(family.prompts) :]) >= 80
        pressed = driver.greedy(family.prompts * 3, NUM_TOKENS, num_blocks=16, enable_prefix_caching=False)
        assert tokens_of(pressed) == family.expected * 3
        # Windows free blocks: `test_window_kinds` has preempted requests of these models.
        windowed = len(driver.runner.info.kinds) > 1
        assert windowed or sum(result.num_preemptions for result in pressed) > 0
