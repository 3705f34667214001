"""Proposed tokens on the GPU's runner, on a device or in Triton's interpreter: answers are those without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from oracle_proposer import oracle
from replay_recorder import ReplayRecorder
from tiny_llama import write_tiny_llama

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.runners.device import device_runner
from pagemill_execution.runners.device.graphs import GraphShape
from pagemill_execution.step import StepPlan
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "greedy-penalties": {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.4, "logprobs": 1},
    "repeats": {"temperature": 0.0, "presence_penalty": -2.0, "frequency_penalty": 0.7},
    "penalties-min-tokens": {
        "temperature": 1.0,
        "min_tokens": 3,
        "stop_token_ids": list(range(0, 64, 3)),
        "repetition_penalty": 0.4,
        "bad_word_token_ids": [[5, 6], [7, 7]],
    },
    "min-tokens": {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": list(range(0, 64, 3))},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [5, 6, 7, 8], "bad_word_token_ids": [[5, 6], [7, 7]]},
    "choices": {"temperature": 0.8, "n": 2, "logprobs": 2},
}
Answers = dict[tuple[str, int], tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, runner_loader: Callable[..., Any]) -> Any:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=16, num_hidden_layers=1)
    return runner_loader(folder, num_kv_blocks=24, max_model_len=64, max_num_seqs=8, device="cuda")


def requests(kinds: Iterable[str]) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=name,
            model="m",
            prompt_token_ids=[(index * 7 + position) % 64 for position in range(13 + 5 * (index % 3))],
            sampling=SamplingParams(max_tokens=8, seed=index, **KINDS[name]),
        )
        for index, name in enumerate(kinds)
    ]


def serve(
    runner: Any, proposals: Proposals | None, kinds: Iterable[str] = KINDS
) -> tuple[Answers, dict[str, list[int]]]:
    """Return tokens and log probabilities of each choice, and a proposal for each request that got some."""
    config = EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=64, overlap=False)
    core, answers, proposed = EngineCore(config, runner, proposals=proposals), Answers(), {}
    launch = runner.launch

    def noted(plan: StepPlan) -> Any:
        proposed.update(plan.proposals)
        return launch(plan)

    runner.launch = noted
    for request in requests(kinds):
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


def knowing(plain: Answers, kinds: Iterable[str] = KINDS, error_rate: float = 0.3) -> Proposals:
    prompts = {request.request_id: request.prompt_token_ids for request in requests(kinds)}
    texts = [prompts[name] + token_ids for (name, _), (token_ids, _) in plain.items()]
    return Proposals([oracle(texts, random.Random(1), error_rate, 64)], 4)


def assert_same(answers: Answers, plain: Answers) -> None:
    assert {name: token_ids for name, (token_ids, _) in answers.items()} == {
        name: token_ids for name, (token_ids, _) in plain.items()
    }
    for name, (_, logprobs) in answers.items():
        assert logprobs == pytest.approx(plain[name][1], abs=1e-3)


def kinds_of(proposed: dict[str, list[int]]) -> set[str]:
    return {name.split("/")[0] for name in proposed}


@pytest.mark.slow
def test_answers_with_proposed_tokens_are_those_without_on_a_device(runner: Any) -> None:
    """With recorded steps; where there is a device, CUDA graphs are another test's."""
    plain, _ = serve(runner, None)
    recorder, is_recorded = ReplayRecorder(), runner._ops.device.type == "cpu"
    if is_recorded:
        runner.capture_graphs([GraphShape(40, 8, False)], lambda: recorder)
    answers, proposed = serve(runner, knowing(plain))
    runner._graphs = None
    assert_same(answers, plain)
    assert kinds_of(proposed) == KINDS.keys()
    assert recorder.num_run or not is_recorded


def test_penalties_count_proposed_tokens_on_a_device(runner: Any) -> None:
    plain, _ = serve(runner, None, ["greedy-penalties"])
    answers, proposed = serve(runner, knowing(plain, ["greedy-penalties"]), ["greedy-penalties"])
    assert_same(answers, plain)
    assert kinds_of(proposed) == {"greedy-penalties"}


@pytest.mark.slow
def test_penalties_that_count_a_proposed_token_more_or_less_are_found(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["greedy-penalties", "repeats"]
    sound, (plain, _) = device_runner._proposed, serve(runner, None, kinds)

    def one_less(*given: Any) -> Any:
        return np.where(np.append(-1, sound(*given)[:-1]) < 0, -1, sound(*given))

    def one_more(*given: Any) -> Any:
        return np.append(sound(*given)[1:], -1)

    for fault in (one_less, one_more):
        monkeypatch.setattr(device_runner, "_proposed", fault)
        answers, _ = serve(runner, knowing(plain, kinds, 0.0), kinds)
        assert any(answers[name][0] != plain[name][0] for name in answers), fault.__name__
