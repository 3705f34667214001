"""Ranks whose steps run on devices give the tokens of one device, and name the one that is lost.

Without GPUs the devices are processes in Triton's interpreter, which exchange by gloo; only NCCL, symmetric memory and
the measuring of memory are then not run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import device_rank
import pytest
import torch
from device_rank import Plan, ReplayRecorder
from hung_processes import hang
from hybrid_models import ALL, write_hybrid
from node_engine import NodeProcess, load_first, node_config, of_node
from oracle_proposer import oracle
from ranked_engine import BASE, SETTINGS, Engine, prompts_of, saved
from triton_device import DEVICE
from waiting import SOON_S

from pagemill_engine.config import EngineConfig
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.runners.ranks.ranked import RankedRunner, RanksLostError
from pagemill_execution.sizing.compute import choose_compute
from pagemill_execution.starting import load_ranks
from pagemill_execution.starting.load_device_ranks import check_devices
from pagemill_execution.starting.preparing import ModelFiles
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu import library
from pagemill_models.spec.model_files import load_model_spec
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


def fails(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the followers that are loaded next do something else."""
    monkeypatch.setattr(load_ranks, "RANK_PROCESS", "device_rank")
    monkeypatch.setenv("PYTHONPATH", str(Path(device_rank.__file__).parent))
    monkeypatch.setenv(device_rank.VARIABLE, json.dumps(plan))


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


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3.5", "bamba"])
def test_devices_divide_heads_with_states(name: str, tmp_path: Path, devices: Load, runner_loader: Any) -> None:
    write_hybrid(*ALL[name], tmp_path)
    single = runner_loader(tmp_path, **SETTINGS)
    expected = Engine(single).run(prompts_of(1)[:2], SHORT)
    single.close()
    assert Engine(devices(tmp_path)).run(prompts_of(1)[:2], SHORT) == expected


@pytest.mark.full
def test_devices_verify_proposed_tokens(llama_folder: Path, devices: Load, runner_loader: Any) -> None:
    prompts = [[5, 6, 7, 8 + index] for index in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    single = runner_loader(llama_folder, **DEVICES)
    expected = Engine(single).run(prompts, params)
    single.close()
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
    engine = Engine(devices(llama_folder), Proposals([oracle(texts, random.Random(4), 0.3, BASE["vocab_size"])]))
    assert engine.run(prompts, params) == expected
    assert engine.core.num_steps < 16


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
