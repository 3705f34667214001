"""Ranks whose steps run on devices give the tokens of one device, and name the one that is lost.

Without GPUs the devices are processes in Triton's interpreter, which exchange by gloo; only NCCL, symmetric memory and
the measuring of memory are then not run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import device_rank
import numpy as np
import pytest
import torch
from device_rank import fails
from hung_processes import hang
from hybrid_models import ALL, write_hybrid
from node_engine import NodeProcess, load_first, node_config, of_node
from oracle_proposer import oracle
from ranked_engine import BASE, SETTINGS, Engine, prompts_of, saved
from replay_recorder import ReplayRecorder
from triton_device import DEVICE
from waiting import SOON_S

from pagemill_engine.config import EngineConfig
from pagemill_engine.proposing.ngram import Ngrams
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.runners.device.device_ranks import DeviceSignals
from pagemill_execution.runners.ranks.ranked import RankedRunner, RanksLostError
from pagemill_execution.sizing.compute import choose_compute
from pagemill_execution.starting import load_ranks
from pagemill_execution.starting.load_device_ranks import check_devices
from pagemill_execution.starting.preparing import ModelFiles
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu import library
from pagemill_kernels.ranks import device_marks
from pagemill_kernels.ranks.device_marks import END, DeviceMarks
from pagemill_kernels.ranks.group import GroupAborted
from pagemill_kernels.ranks.places import OUTSIDE, RankStatus, place_in_words
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
DEVICES = SETTINGS | {"device": "cuda"}
SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FEW = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.9, seed=7, top_p=0.9, max_tokens=6, ignore_eos=True, presence_penalty=0.5, logprobs=2,
    prompt_logprobs=1,
)  # fmt: skip
Load = Callable[..., RankedRunner]


@pytest.fixture
def devices() -> Iterator[Load]:
    """Loads models on several devices; all are closed at the end."""
    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    made = []

    def load(folder: Path, tensor: int = 2, stages: int = 1, stuck_seconds: float = 60.0, **more: Any) -> RankedRunner:
        size = tensor * stages
        config = EngineConfig(
            model=str(folder), tensor_parallel_size=tensor, pipeline_parallel_size=stages, num_threads=size,
            **DEVICES | more,
        )  # fmt: skip
        spec = load_model_spec(folder)
        files = ModelFiles(config, folder, spec, lambda phase, detail: None)
        made.append(load_ranks.load_ranks(files, choose_compute(config, spec), stuck_seconds))
        return made[-1]

    yield load
    for runner in made:
        runner.close()


def lost(engine: Engine, disturb: Callable[[], object] = lambda: None) -> tuple[str, float]:
    """Disturb the ranks in the third step. Returns the message, and the seconds until it came."""
    engine.add(prompts_of(1)[:2], SHORT)
    engine.core.step()
    engine.core.step()
    disturb()
    began = time.monotonic()
    with pytest.raises(RanksLostError) as raised:
        engine.run_out()
    return str(raised.value), time.monotonic() - began


def test_devices_give_the_tokens_of_a_cpu_and_name_the_rank_that_ends(
    llama_folder: Path, devices: Load, runner_loader: Any
) -> None:
    single = runner_loader(llama_folder, **SETTINGS)
    expected = Engine(single).run(prompts_of(1)[:2], FEW)
    single.close()
    runner: Any = devices(llama_folder)
    engine = Engine(runner)
    assert engine.run(prompts_of(1)[:2], FEW) == expected
    (follower,) = runner._followers.ids
    message, took = lost(engine, lambda: os.kill(follower, signal.SIGKILL))
    assert f"rank 1 (process {follower}) ended with the signal SIGKILL; it was last at " in message
    assert took < SOON_S
    with pytest.raises(RanksLostError):
        runner.info.check()


@pytest.mark.full
@pytest.mark.parametrize(("kind", "tensor", "stages"), [
    ("Llama", 3, 1), ("Llama", 1, 2), ("Llama", 2, 2), ("Mixtral", 2, 1), ("Mistral", 2, 1), ("Olmo2", 2, 1),
])  # fmt: skip
def test_devices_of_any_division_give_the_tokens_of_one(
    kind: str, tensor: int, stages: int, tmp_path: Path, devices: Load, runner_loader: Any
) -> None:
    folder = saved(kind, tmp_path)
    single = runner_loader(folder, **DEVICES)
    alone = Engine(single)
    expected = [alone.run(prompts_of(2)[:4], params) for params in (SHORT, DRAWN, SHORT)]
    single.close()
    engine = Engine(devices(folder, tensor, stages), pipeline_parallel_size=stages)
    assert [engine.run(prompts_of(2)[:4], params) for params in (SHORT, DRAWN, SHORT)] == expected


ASKED: dict[str, dict[str, Any]] = {
    "the best": {"temperature": 0.0},
    "drawn": {"top_p": 0.9, "min_p": 0.01, "logprobs": 3, "prompt_logprobs": 1},
    "few allowed": {"allowed_token_ids": [3, 64, 65, 66, 130], "top_k": 40},
    "a bias and named tokens": {"logit_bias": {130: 4.0, 0: 4.0, 66: -100.0}, "logprob_token_ids": [0, 130]},
    "penalties": {"temperature": 0.0, "repetition_penalty": 0.5, "frequency_penalty": 2.0, "max_tokens": 8},
    "an end that waits": {"min_tokens": 3, "stop_token_ids": [130, 3], "logit_bias": {130: 50.0}, "ignore_eos": False},
}  # fmt: skip


PROMPTS = {name: [5, 70, 100, 130] * 5 + [number] for number, name in enumerate(ASKED)}
"""What n-grams find, and the prefix cache from the second time on."""


def asked(engine: Engine) -> dict[str, tuple[list[int], list[Any], list[int]]]:
    """Return the tokens of requests that run together, each with other parameters, their log probabilities, and how
    many tokens each step gave."""
    found: dict[str, tuple[list[int], list[Any], list[int]]] = {name: ([], [], []) for name in ASKED}
    for name, params in ASKED.items():
        sampling = SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 5, "ignore_eos": True} | params)
        engine.core.add(
            GenerateRequest(request_id=name, model="test", prompt_token_ids=PROMPTS[name], sampling=sampling)
        )
    while engine.core.has_work:
        for output in engine.core.step().outputs:
            assert output.error is None
            found[output.request_id][0].extend(output.token_ids)
            found[output.request_id][1].extend([*(output.logprobs or []), *output.prompt_logprobs])
            found[output.request_id][2].append(len(output.token_ids))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings", "stages"), [
    ("Llama", {}, 1),
    pytest.param("Llama", {}, 2, marks=pytest.mark.full),
    pytest.param("Llama", {"quantization": "int4"}, 1, marks=pytest.mark.full),
    pytest.param("Llama", {"quantization": "int8", "kv_cache_dtype": "int8"}, 1, marks=pytest.mark.full),
    pytest.param("Mixtral", {"quantization": "int4"}, 1, marks=pytest.mark.full),
    pytest.param("Olmo2", {}, 1, marks=pytest.mark.full),
])  # fmt: skip
def test_devices_answer_what_one_does_whatever_is_asked(
    kind: str, settings: dict[str, Any], stages: int, tmp_path: Path, devices: Load, runner_loader: Any
) -> None:
    """With masks, biases, penalties, filters and log probabilities, proposed tokens and cached prefixes."""
    folder = saved(kind, tmp_path)
    single = runner_loader(folder, **DEVICES | settings)
    alone = Engine(single)
    expected = [asked(alone), asked(alone)]
    single.close()
    runner = devices(folder, 2, stages, **settings)
    texts = [PROMPTS[name] + tokens for name, (tokens, _, _) in expected[0].items()]
    methods = [Ngrams(), oracle(texts, random.Random(4), 0.2, BASE["vocab_size"])]
    engine = Engine(runner, Proposals(methods), overlap=stages > 1)
    for found, theirs in zip([asked(engine), asked(engine)], expected, strict=True):
        assert max(found["penalties"][2]) > 1, "proposed tokens were verified"
        for name in ASKED:
            assert found[name][0] == theirs[name][0], name
            assert len(found[name][1]) == len(theirs[name][1])
            for ours, other in zip(found[name][1], theirs[name][1], strict=True):
                # Sums over ranks round differently from one device's.
                np.testing.assert_allclose(ours.logprobs, other.logprobs, atol=2e-3)
    assert set(expected[0]["few allowed"][0]) <= {3, 64, 65, 66, 130}


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3.5", "bamba"])
def test_devices_divide_heads_with_states(name: str, tmp_path: Path, devices: Load, runner_loader: Any) -> None:
    write_hybrid(*ALL[name], tmp_path)
    single = runner_loader(tmp_path, **SETTINGS)
    expected = Engine(single).run(prompts_of(1)[:2], SHORT)
    single.close()
    assert Engine(devices(tmp_path)).run(prompts_of(1)[:2], SHORT) == expected


@pytest.mark.parametrize(("tensor", "stages"), [
    pytest.param(2, 1, marks=pytest.mark.full),
    pytest.param(1, 2, marks=pytest.mark.slow),
    pytest.param(2, 2, marks=pytest.mark.full),
])  # fmt: skip
def test_devices_verify_proposed_tokens(
    tensor: int, stages: int, llama_folder: Path, devices: Load, runner_loader: Any
) -> None:
    prompts = [[5, 6, 7, 8 + index] for index in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    single = runner_loader(llama_folder, **DEVICES)
    expected = Engine(single).run(prompts, params)
    single.close()
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
    proposals = Proposals([oracle(texts, random.Random(4), 0.3, BASE["vocab_size"])])
    engine = Engine(devices(llama_folder, tensor, stages), proposals, overlap=stages > 1)
    assert engine.run(prompts, params) == expected
    assert engine.core.num_steps < 10 * stages
    assert engine.num_accepted > 5


@pytest.mark.full
@pytest.mark.parametrize("stages", [1, 2])
def test_recorded_steps_contain_the_exchanges(
    stages: int, llama_folder: Path, devices: Load, runner_loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no device, what is recorded runs again on the same buffers."""
    single = runner_loader(llama_folder, **DEVICES)
    expected = Engine(single).run(prompts_of(1)[:3], SHORT)
    single.close()
    fails(monkeypatch, {"records": True})
    recorder = ReplayRecorder()
    with device_rank.recording(recorder):
        runner = devices(llama_folder, 1 if stages > 1 else 2, stages)
    engine = Engine(runner, pipeline_parallel_size=stages)
    assert engine.run(prompts_of(1)[:3], SHORT) == expected
    assert recorder.num_run > 3


@pytest.mark.full
def test_devices_of_two_nodes_give_the_tokens_of_one_and_name_the_node_that_ends(
    llama_folder: Path, tmp_path: Path, runner_loader: Any
) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("each node needs a GPU of its own")
    single = runner_loader(llama_folder, **DEVICES)
    expected = Engine(single).run(prompts_of(1)[:3], SHORT)
    single.close()
    config = node_config(llama_folder, 2, device="cuda")
    node = NodeProcess(tmp_path, of_node(config, 1))
    runner = load_first(config)
    try:
        engine = Engine(runner)
        assert engine.run(prompts_of(1)[:3], SHORT) == expected
        message, took = lost(engine, lambda: os.killpg(node.process.pid, signal.SIGKILL))
        assert "rank 1 (node 1 at 127.0.0.1) ended its connection; it was last at " in message
        assert took < SOON_S
    finally:
        node.process.kill()
        node.process.wait()
        runner.close()


@pytest.mark.full
def test_a_device_rank_that_stops_is_named_with_what_it_has_not_reached(llama_folder: Path, devices: Load) -> None:
    runner: Any = devices(llama_folder, stuck_seconds=3.0)
    (follower,) = runner._followers.ids
    message, took = lost(Engine(runner), lambda: hang(follower))
    os.kill(follower, signal.SIGCONT)
    assert "rank 1 has not reached exchange 1 of step 3 within 3 s; it was last at " in message
    assert message.endswith(" of step 2")
    assert 3.0 <= took < 3.0 + SOON_S


@pytest.mark.full
@pytest.mark.parametrize("how", ["raises", "stops"])
def test_a_device_rank_that_fails_within_a_step_is_named_with_the_exchange(
    how: str, llama_folder: Path, devices: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, {how: [3, 2]})
    runner: Any = devices(llama_folder, stuck_seconds=3.0)
    message, _ = lost(Engine(runner))
    if how == "raises":
        assert "rank 1 at exchange 2 of step 3: MemoryError: no memory" in message
    else:
        assert "rank 1 has not reached exchange 2 of step 3 within 3 s; it was last at exchange 1 of step 3" in message


@pytest.mark.full
def test_a_step_that_raises_on_the_first_device_ends_the_engine(
    llama_folder: Path, devices: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks wait in an exchange that no host takes back."""
    runner: Any = devices(llama_folder)

    def failing(*_: Any) -> Any:
        raise MemoryError("no memory")

    message, _ = lost(Engine(runner), lambda: monkeypatch.setattr(runner._inner._inner, "_logits", failing))
    assert "rank 0 at " in message
    assert message.endswith("MemoryError: no memory")


@pytest.mark.full
def test_a_device_rank_that_cannot_load_says_why(
    llama_folder: Path, devices: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, {"cannot load": True})
    with pytest.raises(LoadError, match=r"Rank 1 did not load its part of the model: .*no room for it"):
        devices(llama_folder)


def test_more_ranks_than_devices_are_refused_by_number() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, pipeline_parallel_size=2)
    check_devices(config, 4)
    with pytest.raises(LoadError, match=r"tensorParallel 2 x pipelineParallel 2 need 4 GPUs on this machine, .* has 3"):
        check_devices(config, 3)


class Group:
    """Where ranks are, as the host's group has it, and what rank 0 says of them."""

    rank = 0

    def __init__(self, places: list[tuple[int, int]]) -> None:
        self.size, self.places, self.said = len(places), places, ""
        self.added: list[tuple[float, int]] = []

    def begin_step(self, step: int) -> None:
        pass  # rank 0's own place is given, too

    def come_to(self, place: int, cut: int | None = None) -> None:
        pass

    def status(self, rank: int) -> RankStatus:
        step, cut = self.places[rank]
        return RankStatus(0, step, OUTSIDE, cut)

    def add_computed(self, seconds: float, steps: int) -> None:
        self.added.append((round(seconds, 6), steps))

    def place(self, rank: int) -> str:
        return f"at {place_in_words(self.status(rank), rank, has_stages=False)}"

    def recover(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def computed(self) -> list[Any]:
        return []

    def reason(self) -> str | None:
        return self.said or None

    def lose(self, reason: str) -> None:
        self.said = reason

    @property
    def is_lost(self) -> bool:
        return bool(self.said)


@pytest.mark.parametrize(("members", "places", "named"), [
    (2, [(7, 4), (7, 4)], ""),
    (2, [(7, 4), (7, 3)], "rank 1 has not reached exchange 4 of step 7 within 0 s; it was last at exchange 3"),
    (2, [(7, 3), (7, 4)], "rank 0 has not reached exchange 4 of step 7 within 0 s; it was last at exchange 3"),
    (1, [(7, 1), (7, END)], ""),
    (1, [(7, 1), (8, 1)], ""),
    (1, [(7, 1), (7, 2)], "rank 1 has not reached exchange 1 of step 7 within 0 s; it was last at exchange 2"),
    # The first stage's second rank keeps all others: its neighbour, and the last stage.
    (2, [(7, 1), (7, 1), (7, 6), (7, 5)], "rank 3 has not reached exchange 6 of step 7 within 0 s"),
    # Of three stages the middle one has not ended its step; the last one only waits.
    (1, [(7, 1), (7, 2), (8, 1)], "rank 1 has not reached exchange 1 of step 7 within 0 s"),
])  # fmt: skip
def test_the_rank_that_others_wait_for_is_named(members: int, places: list[tuple[int, int]], named: str) -> None:
    """By where devices are, whatever their hosts have queued."""
    group = Group(places)
    signals = DeviceSignals(group, torch.device("cpu"), members, 0.0)
    with suppress(GroupAborted):
        signals.look()
    signals.close()
    assert group.said.startswith(named) if named else not group.said


def test_marks_count_the_exchanges_of_a_step_and_its_end() -> None:
    marks = DeviceMarks(DEVICE)

    def seen() -> tuple[int, int]:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return marks.read()[:2]

    assert seen() == (0, 0)
    for step in (3, 4):
        marks.begin(step)
        assert seen() == (step, 0)
        for number in (1, 2):
            marks.exchange()
            assert seen() == (step, number)
            marks.leave()
        marks.end()
        assert seen() == (step, END)
    assert marks.read().num_steps == 2


def test_what_a_device_computes_is_without_its_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 5_000_000_000
    monkeypatch.setattr(device_marks, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    group = Group([(0, 0)])
    signals = DeviceSignals(group, torch.device("cpu"), 1)
    calls = [lambda: signals.begin_step(1), signals.come, signals.leave, signals.come, signals.leave, signals.report]
    for call, milliseconds in zip(calls, (10, 900, 20, 700, 40, 0), strict=True):
        call()
        now_ns += milliseconds * 1_000_000
    signals.close()
    signals.say()
    assert group.added == [(0.07, 1)]
