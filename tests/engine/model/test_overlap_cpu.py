"""The CPU runner in a thread of its own: the overlapped loop gives the answers of the plain one for all parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import write_tiny_llama

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners.eager import EagerRunner, ThreadedRunner
from pagemill_kernels.cpu import launch as native_launch
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def requests() -> list[GenerateRequest]:
    """Return requests with all kinds of sampling, stops and several choices, beyond the cache's size."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": list(range(0, 64, 3))},
        {"temperature": 1.0, "stop_token_ids": list(range(0, 64, 5))},
        {"temperature": 0.8, "n": 3, "logprobs": 2},
    ]
    return [
        GenerateRequest(
            request_id=f"r{index}",
            model="m",
            prompt_token_ids=[(index * 7 + position) % 64 for position in range(3 + 5 * (index % 4))],
            sampling=SamplingParams(max_tokens=10 + index, seed=index, **kinds[index % len(kinds)]),
        )
        for index in range(12)
    ]


def serve(runner: Any, overlap: bool) -> tuple[dict[tuple[str, int], list[int]], EngineCore]:
    config = EngineConfig(model="m", block_size=4, max_num_seqs=6, max_num_batched_tokens=32, overlap=overlap)
    core = EngineCore(config, runner)
    for each in requests():
        core.add(each)
    answers: dict[tuple[str, int], list[int]] = {}
    while core.has_work:
        for output in core.step().outputs:
            assert output.error is None
            answers.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
    core.check_integrity()
    return answers, core


def test_both_loops_give_equal_answers_on_a_real_model(folder: Path, runner_loader: Callable[..., Any]) -> None:
    answers = {}
    for overlap in (False, True):
        runner = runner_loader(folder, num_kv_blocks=20, block_size=4, max_model_len=64, overlap=overlap)
        assert isinstance(runner, ThreadedRunner if overlap else EagerRunner)
        answers[overlap], core = serve(runner, overlap)
        assert core.scheduler.num_preemptions > 0
        runner.close()
    assert answers[True] == answers[False]
    assert len(answers[True]) == 16
    assert any(len(token_ids) < 10 for token_ids in answers[True].values()), "no answer was ended by a stop token"


def test_the_thread_computes_with_the_configured_number_of_threads(
    folder: Path, runner_loader: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP's setting applies to one thread: without further code, the new one would use all cores."""
    seen: list[tuple[int, int]] = []
    sound = EagerRunner.launch

    def launch(self: EagerRunner, plan: Any) -> Any:
        seen.append((native_launch.num_threads(), torch.get_num_threads()))
        return sound(self, plan)

    monkeypatch.setattr(EagerRunner, "launch", launch)
    settings = {"num_kv_blocks": 32, "block_size": 4, "max_model_len": 64, "overlap": True, "num_threads": 1}
    runner = runner_loader(folder, by_torch=True, **settings)
    serve(runner, True)
    runner.close()
    assert set(seen) == {(1, 1)}
