"""Proposed tokens on the GPU's runner, on a device or in Triton's interpreter: answers are those without."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from oracle_proposer import oracle
from tiny_llama import write_tiny_llama

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.runners.device import device_runner
from pagemill_execution.step import AdmittedSequence, HeldBlocks, StepPlan
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "min-tokens": {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": list(range(0, 64, 3))},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [5, 6, 7, 8], "bad_word_token_ids": [[5, 6], [7, 7]]},
    "choices": {"temperature": 0.8, "n": 2, "logprobs": 2},
}
Answers = dict[tuple[str, int], tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, runner_loader: Callable[..., Any]) -> Any:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=16, num_hidden_layers=1)
    return runner_loader(folder, num_kv_blocks=24, max_model_len=64, max_num_seqs=8, device="cuda")


def requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=name,
            model="m",
            prompt_token_ids=[(index * 7 + position) % 64 for position in range(13 + 5 * (index % 3))],
            sampling=SamplingParams(max_tokens=8, seed=index, **kind),
        )
        for index, (name, kind) in enumerate(KINDS.items())
    ]


def serve(runner: Any, proposals: Proposals | None) -> tuple[Answers, dict[str, list[int]]]:
    """Return tokens and log probabilities of each choice, and a proposal for each request that got some."""
    config = EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=64, overlap=False)
    core, answers, proposed = EngineCore(config, runner, proposals=proposals), Answers(), {}
    launch = runner.launch

    def noted(plan: StepPlan) -> Any:
        proposed.update(plan.proposals)
        return launch(plan)

    runner.launch = noted
    for request in requests():
        core.add(request)
    while core.has_work:
        for output in core.step().outputs:
            assert output.error is None
            token_ids, logprobs = answers.setdefault((output.request_id, output.choice), ([], []))
            token_ids += output.token_ids
            logprobs += [value for entry in output.logprobs or [] for value in entry.logprobs]
    core.check_integrity()
    del runner.launch
    runner.wait(runner.launch(StepPlan(step=0, num_scheduled_tokens={}, released=list(runner._rows._row_of))))
    return answers, proposed


@pytest.mark.slow
def test_answers_with_proposed_tokens_are_those_without_on_a_device(runner: Any) -> None:
    """Rows with penalties get none: their tokens depend on each other, and a device samples all at once."""
    plain, _ = serve(runner, None)
    prompts = {request.request_id: request.prompt_token_ids for request in requests()}
    texts = [prompts[name] + token_ids for (name, _), (token_ids, _) in plain.items()]
    of = oracle(texts, random.Random(1), 0.3, 64)
    answers, proposed = serve(runner, Proposals([of], 4, can_verify=device_runner.can_verify))
    assert answers.keys() == plain.keys()
    for name, (token_ids, logprobs) in answers.items():
        assert token_ids == plain[name][0], name
        assert logprobs == pytest.approx(plain[name][1], abs=1e-3)
    assert {name.split("/")[0] for name in proposed} == KINDS.keys() - {"penalties"}


def test_proposed_tokens_of_a_row_with_penalties_are_refused(runner: Any) -> None:
    penalised = SamplingParams(temperature=0.0, presence_penalty=1.0, max_tokens=8)
    row = AdmittedSequence("a", [1, 2, 3], 3, 0, [HeldBlocks(0, [2])], penalised, 0, 0)
    plan = StepPlan(0, {"a": 5}, admitted=[row], samples={"a"}, proposals={"a": [4, 5]})
    with pytest.raises(ValueError, match="proposed for a, whose penalties"):
        runner.wait(runner.launch(plan))
    runner.wait(runner.launch(StepPlan(0, {}, released=["a"])))
