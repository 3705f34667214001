"""Hybrids on the GPU's runner, on a device or in Triton's interpreter: both loops, recorded steps, hits, proposals,
sleep and moved states. Answers are those of the CPU's kernels; memory that was not written is not a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hybrid_models import ALL, write_hybrid
from hybrid_requests import KINDS
from oracle_proposer import oracle
from replay_recorder import ReplayRecorder

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.decoders.on_torch.context import StateTensors
from pagemill_execution.runners.device.device_runner import DeviceRunner
from pagemill_execution.runners.device.graphs import shapes_to_capture
from pagemill_execution.runners.inputs import StateRows
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_kv_blocks": 24, "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 24,
}  # fmt: skip
PROMPTS = [[(7 * index + 11 * place * place) % 90 for place in range(length)] for index, length in enumerate((21, 3))]
NUM_TOKENS = 14
"""So many that single tokens complete a block."""
Answers = list[list[int]]


def spoil(runner: DeviceRunner) -> None:
    """Overwrite what no step has written."""
    for layer in runner.kv_cache.layers:
        if isinstance(layer, StateTensors):
            layer.log.fill_(torch.nan)
            layer.inputs.fill_(torch.nan)
            layer.states[:-1], layer.windows[:-1] = torch.nan, torch.nan


def serve(
    runner: Any, prompts: Answers, proposals: Proposals | None = None, num_tokens: int = NUM_TOKENS, **settings: Any
) -> tuple[Answers, Any]:
    """Return the answers to prompts, each of which comes when the one before was answered half, and the core."""
    config = EngineConfig(model="m", block_size=runner.info.block_size, max_num_batched_tokens=24, **settings)
    core = EngineCore(config, runner)
    if proposals is not None:
        core.scheduler._proposals = proposals
    answers: dict[str, list[int]] = {}
    waiting = list(enumerate(prompts))
    while waiting or core.has_work:
        if waiting and len(answers.get(str(waiting[0][0] - 1), [0] * num_tokens)) > num_tokens // 2:
            number, prompt = waiting.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            core.add(GenerateRequest(request_id=str(number), model="m", prompt_token_ids=prompt, sampling=params))
        for output in core.step().outputs:
            assert output.error is None
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    core.check_integrity()
    runner._rows.release(list(runner._rows._row_of))
    return [answers[str(number)] for number in range(len(prompts))], core


class Pair:
    """A hybrid's runner for devices, and what the CPU answers."""

    def __init__(self, folder: Path, loader: Callable[..., Any]) -> None:
        self.prompts = [*PROMPTS, PROMPTS[0][:18]]
        cpu = loader(folder, **SETTINGS)
        self.expected, _ = serve(cpu, self.prompts)
        cpu.close()
        self.folder, self.loader = folder, loader

    def load(self, **settings: Any) -> DeviceRunner:
        runner = self.loader(self.folder, device="cuda", **SETTINGS | settings)
        assert isinstance(runner, DeviceRunner)
        spoil(runner)
        return runner


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any, runner_loader: Callable[..., Any]) -> Pair:
    folder = tmp_path_factory.mktemp("hybrid")
    write_hybrid(*KINDS[request.param], folder)
    return Pair(folder, runner_loader)


@pytest.mark.slow
@pytest.mark.sample("delta rule-plain")
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_answers_equal_those_of_the_cpu(pair: Pair, overlap: bool) -> None:
    """Also behind a hit, in a row whose log and inputs are another's."""
    answers, core = serve(pair.load(), pair.prompts, overlap=overlap)
    assert answers == pair.expected
    assert core.num_steps > NUM_TOKENS


@pytest.mark.slow
@pytest.mark.sample("short convolution")
def test_recorded_steps_equal_those_of_the_cpu_also_after_sleep(pair: Pair) -> None:
    runner, recorder = pair.load(), ReplayRecorder()
    runner.capture_graphs(shapes_to_capture(2, 24), lambda: recorder)
    runner._forward.logits = None  # type: ignore[assignment,method-assign]  # called if no graph fits
    assert serve(runner, pair.prompts)[0] == pair.expected
    assert recorder.num_run > NUM_TOKENS
    runner.sleep()
    runner.wake()
    spoil(runner)
    assert serve(runner, pair.prompts[:1])[0] == pair.expected[:1]


@pytest.mark.slow
@pytest.mark.sample("state space")
def test_proposed_tokens_are_taken_back(pair: Pair) -> None:
    texts = [prompt + answer for prompt, answer in zip(pair.prompts, pair.expected, strict=True)]
    runner = pair.load(speculative=SpeculationConfig(method="ngram", num_tokens=6))
    proposals = Proposals([oracle(texts, random.Random(4), 0.3, 90)], 6)
    answers, core = serve(runner, pair.prompts, proposals)
    assert answers == pair.expected
    assert core.num_steps < 3 * NUM_TOKENS // 2


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of large values, whose sigmoid is 0
@pytest.mark.parametrize("name", [*ALL])
def test_every_family_answers_as_on_the_cpu(name: str, tmp_path: Path, runner_loader: Callable[..., Any]) -> None:
    write_hybrid(*ALL[name], tmp_path)
    prompts = [PROMPTS[0][:17], PROMPTS[1]]
    cpu = runner_loader(tmp_path, **SETTINGS)
    expected, _ = serve(cpu, prompts, num_tokens=4)
    if "kimi" in name:  # its other layers are refused by name
        with pytest.raises(LoadError, match="latent"):
            runner_loader(tmp_path, device="cuda", **SETTINGS)
        return
    runner = runner_loader(tmp_path, device="cuda", **SETTINGS)
    spoil(runner)
    assert serve(runner, prompts, num_tokens=4)[0] == expected


def not_zeroed(batch: StateBatch) -> StateBatch:
    return batch._replace(sources=np.where(batch.num_computed == 0, 0, batch.sources))


def late(batch: StateBatch) -> StateBatch:
    one = (batch.num_logged == 15).astype(int)
    return batch._replace(num_logged=batch.num_logged - one, num_computed=batch.num_computed - one)


FAULTS: dict[str, Callable[[StateBatch], StateBatch]] = {
    "a state is not zeroed at admission": not_zeroed,
    "a snapshot is one token late": late,
    "a window is shifted": lambda batch: batch._replace(num_computed=batch.num_computed - batch.num_computed % 2),
    "a block is folded twice": lambda batch: batch._replace(
        num_logged=batch.num_logged + 16 * ((batch.num_logged == 0) & (batch.num_computed > 0))
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(pair: Pair, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, gather = pair.load(), StateRows.gather
    if "folded" in fault and not any(
        each.log.numel() for each in runner.kv_cache.layers if isinstance(each, StateTensors)
    ):
        pytest.skip("a convolution alone folds nothing")
    monkeypatch.setattr(StateRows, "gather", lambda rows, *inputs: FAULTS[fault](gather(rows, *inputs)))
    try:
        answers, _ = serve(runner, pair.prompts, overlap=True)
    except AssertionError:  # of an answer that is not a number
        return
    assert answers != pair.expected


@pytest.mark.slow
def test_states_are_copied_with_their_windows(pair: Pair) -> None:
    cache = pair.load().kv_cache
    layer = next(each for each in cache.layers if isinstance(each, StateTensors))
    layer.states[0], layer.windows[0] = 1.0, 2.0
    cache.copy_blocks([*([[]] * (len(cache.counts) - 1)), [(0, 1)]])
    assert bool((layer.states[1] == 1).all())
    assert bool((layer.windows[1] == 2).all())
    assert not bool(layer.windows[-1].any()), "the zero state"


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_cuda_graphs_of_hybrids_give_the_answers_of_the_cpu(pair: Pair, overlap: bool) -> None:
    runner = pair.load()
    assert runner._graphs is not None
    assert serve(runner, pair.prompts, overlap=overlap)[0] == pair.expected
