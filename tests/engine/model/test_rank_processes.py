"""Processes that compute a model together give the tokens of one."""

from __future__ import annotations

import random
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any

import different_rank
import psutil
import pytest
from different_rank import OTHER_VERSION
from oracle_proposer import oracle
from ranked_engine import BASE, LONG, ROUNDS, SETTINGS, Engine, Ranks, answers, prompts_of, saved

from pagemill_engine.config import EngineConfig
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.runners.eager import ThreadedRunner
from pagemill_execution.runners.ranks.identity import RankIdentity, check_same
from pagemill_execution.starting.factory import create_runner
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.safetensors_folder import SafetensorsFolder
from pagemill_kernels.cpu import library
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")


@pytest.fixture(scope="module", params=["Llama", "Olmo2", "Mixtral", "Mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_give_the_tokens_of_one(folder: Path, size: int, ranks: Ranks, runner_loader: Any) -> None:
    single = runner_loader(folder, **SETTINGS)
    expected = answers(single)
    single.close()
    assert answers(ranks(folder, size)) == expected


def test_the_last_token_of_a_vocabulary_that_does_not_divide_is_read_and_chosen(
    llama_folder: Path, ranks: Ranks, runner_loader: Any
) -> None:
    last = BASE["vocab_size"] - 1
    prompts = [[last, 5, last], [7, last]]
    single = runner_loader(llama_folder, **SETTINGS)
    expected = Engine(single).run(prompts, ROUNDS[0])
    single.close()
    engine = Engine(ranks(llama_folder, 3))
    assert engine.run(prompts, ROUNDS[0]) == expected
    chosen = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias={last: 100.0})
    assert [tokens for tokens, _ in engine.run(prompts, chosen)] == [[last] * 4] * 2


@pytest.mark.parametrize(
    "settings", [{"quantization": "int4"}, {"kv_cache_dtype": "int8", "dtype": "bfloat16"}], ids=str
)
def test_ranks_read_their_parts_of_quantized_weights(
    llama_folder: Path, ranks: Ranks, runner_loader: Any, settings: dict[str, Any]
) -> None:
    single = runner_loader(llama_folder, **SETTINGS | settings)
    expected = Engine(single).run(prompts_of(1), ROUNDS[0])
    single.close()
    found = Engine(ranks(llama_folder, 2, **settings)).run(prompts_of(1), ROUNDS[0])
    if "quantization" in settings:
        assert found == expected
    else:  # sums of bfloat16 products differ by their rounding, and so may near ties
        assert [tokens[0] for tokens, _ in found] == [tokens[0] for tokens, _ in expected]


@pytest.mark.parametrize("kind", ["Gemma2", pytest.param("DeepseekV2", marks=pytest.mark.full)])
def test_ranks_by_torch_give_the_tokens_of_one(kind: str, tmp_path: Path, ranks: Ranks, runner_loader: Any) -> None:
    folder = saved(kind, tmp_path)
    single = runner_loader(folder, **SETTINGS)
    expected = answers(single)
    single.close()
    assert answers(ranks(folder, 2)) == expected


@pytest.mark.parametrize("error_rate", [pytest.param(0.0, marks=pytest.mark.full), 0.4])
def test_ranks_verify_proposed_tokens(llama_folder: Path, ranks: Ranks, runner_loader: Any, error_rate: float) -> None:
    prompts = [[5, 6, 7, 8 + index] for index in range(8)]
    single = runner_loader(llama_folder, **SETTINGS)
    expected = Engine(single).run(prompts, LONG)
    single.close()
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
    engine = Engine(
        ranks(llama_folder, 2), Proposals([oracle(texts, random.Random(4), error_rate, BASE["vocab_size"])])
    )
    assert engine.run(prompts, LONG) == expected
    assert engine.core.num_steps < (30 if error_rate == 0 else 58)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_followers_that_wait_use_no_time(llama_folder: Path, ranks: Ranks, num_stages: int) -> None:
    runner: Any = ranks(llama_folder, 2, num_stages=num_stages)
    Engine(runner).run(prompts_of(1), ROUNDS[0])
    (process,) = map(psutil.Process, runner._followers.ids)
    took_s: list[float] = []
    while len(took_s) < 5 and min(took_s, default=1.0) >= 0.1:  # other processes that use the same caches add to it
        used, ended = sum(process.cpu_times()[:2]), time.monotonic() + 2
        while time.monotonic() < ended:
            assert select.select([], [], [], 0.2) == ([], [], [])
        took_s.append(sum(process.cpu_times()[:2]) - used)
    assert min(took_s) < 0.1


def test_ranks_follow_preemption_overlap_and_sleep(llama_folder: Path, ranks: Ranks, runner_loader: Any) -> None:
    single = runner_loader(llama_folder, **SETTINGS)
    expected = Engine(single).run([[5, 6, 7, 8 + index] for index in range(8)], LONG)
    single.close()
    runner = ranks(llama_folder, 3)
    runner.info = runner.info._replace(num_blocks=12)
    threaded = ThreadedRunner(runner)
    engine = Engine(threaded, overlap=True, enable_prefix_caching=False)
    assert engine.run([[5, 6, 7, 8 + index] for index in range(8)], LONG) == expected
    assert engine.num_preemptions > 0
    assert threaded.sleep() > 0
    threaded.wake()
    assert engine.run([[5, 6, 7, 8 + index] for index in range(8)], LONG) == expected
    threaded._thread.shutdown()


def test_what_cannot_be_divided_is_refused_with_the_reason(llama_folder: Path, ranks: Ranks) -> None:
    with pytest.raises(LoadError, match=r"cannot be divided among 5 ranks\. Lower tensorParallel"):
        ranks(llama_folder, 5)
    with pytest.raises(LoadError, match="3 processes that compute at the same time, but they may use 2 cores"):
        ranks(llama_folder, 3, num_threads=2)


def test_one_process_runs_no_line_for_ranks(llama_folder: Path, runner_loader: Any) -> None:
    called: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            called.add(frame.f_code.co_filename)

    threading.setprofile(note)  # for the thread that runs the steps
    sys.setprofile(note)
    try:
        single = runner_loader(llama_folder, **SETTINGS)
        answers(single)
        single.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert any(name.endswith("runners/eager.py") for name in called)
    of_ranks = ("/runners/ranks/", "/pagemill_kernels/ranks/", "/starting/load_ranks", "/starting/nodes")
    assert [name for name in called if any(part in name for part in of_ranks)] == []


def test_simulated_devices_are_one_process() -> None:
    config = EngineConfig(model="m", null_runner=True, pipeline_parallel_size=2)
    with pytest.raises(LoadError, match=r"pipelineParallel is 2, but a simulated device runs one process\. Set"):
        create_runner(config, lambda phase, detail: None)
    with pytest.raises(ValueError, match="must be at most 64 processes, got 33 x 2"):
        EngineConfig(model="m", tensor_parallel_size=33, pipeline_parallel_size=2)


@pytest.mark.parametrize(("size", "num_stages"), [(3, 1), (2, 2)])
def test_the_plan_of_memory_counts_what_all_ranks_hold(
    llama_folder: Path, ranks: Ranks, runner_loader: Any, size: int, num_stages: int
) -> None:
    """Three ranks share two heads of keys and values, so one of these is on two ranks; every rank has the norms."""
    runner: Any = ranks(llama_folder, size, num_stages=num_stages)
    single = runner_loader(llama_folder, **SETTINGS)
    planned, alone = runner.info.memory, single.info.memory
    assert planned.weight_bytes == runner.info.weight_bytes
    assert runner.info.kv_bytes_per_token * 2 == single.info.kv_bytes_per_token * (3 if size == 3 else 2)
    assert planned.kv_bytes == runner.info.kv_bytes_per_token * 64 * 16
    assert planned.activation_bytes > alone.activation_bytes + (size - 1) * planned.process_bytes
    single.close()


def test_a_follower_that_cannot_load_says_why(
    llama_folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill_execution.starting.load_ranks.RANK_PROCESS", "json.tool")
    with pytest.raises(LoadError, match="Rank 1 did not load its part of the model"):
        ranks(llama_folder, 2)


@pytest.mark.sample("weights")
@pytest.mark.parametrize("field", ["weights", "version"])
def test_ranks_that_differ_are_refused_before_anything_is_served(
    llama_folder: Path, tmp_path: Path, ranks: Ranks, runner_loader: Any, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """The second rank has a newer revision of the model, or another version of the program."""
    other = saved("Llama", tmp_path / "other", initializer_range=0.2) if field == "weights" else OTHER_VERSION
    monkeypatch.setattr("pagemill_execution.starting.load_ranks.RANK_PROCESS", "different_rank")
    monkeypatch.setenv("PYTHONPATH", str(Path(different_rank.__file__).parent))
    monkeypatch.setenv(different_rank.VARIABLE, str(other))
    with pytest.raises(LoadError) as raised:
        ranks(llama_folder, 2)
    assert raised.value.reason == "RankMismatch"
    if field == "weights":
        digests = [digest_of(each) for each in (other, llama_folder)]
        expected = "Rank 1 has the digest of the weights {}, but rank 0 has {}. Give all ranks the same files".format(
            *digests
        )
    else:
        own = RankIdentity.own().version
        expected = f"Rank 1 has the version {OTHER_VERSION}, but rank 0 has {own}. Install the same version of pagemill"
    assert raised.value.message.startswith(expected)


def digest_of(folder: Any) -> str:
    """Return the digest of a folder's weights."""
    return SafetensorsFolder(folder).digest()


def test_every_difference_of_ranks_is_named() -> None:
    own = RankIdentity("0.1", 1, 23, "d")
    check_same("Rank 3", own, own)
    check_same("Rank 3", RankIdentity("0.1", 1, 23), own)  # it has not read weights yet
    for other, named in (
        (RankIdentity("0.2", 1, 23, "d"), "the version 0.2, but rank 0 has 0.1"),
        (RankIdentity("0.1", 2, 23, "d"), "the format of plans 2, but rank 0 has 1"),
        (RankIdentity("0.1", 1, 22, "d"), "the version of the native kernels' interface 22, but rank 0 has 23"),
        (RankIdentity("0.1", 1, 23, "e"), "the digest of the weights e, but rank 0 has d"),
    ):
        with pytest.raises(LoadError, match=f"RankMismatch: Rank 3 has {named}"):
            check_same("Rank 3", other, own)
