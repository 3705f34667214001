"""Processes that compute a model together give the tokens of one; what ends a rank ends the engine, with its name."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import expert_models
import failing_rank
import psutil
import pytest
import torch
import transformers
from oracle_proposer import oracle

from pagemill_engine.config import EngineConfig
from pagemill_engine.executing.eager import ThreadedRunner
from pagemill_engine.executing.ranks.ranked import RankedRunner, RanksLostError
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_engine.sizing.compute import choose_compute
from pagemill_engine.starting.load_ranks import load_on_ranks
from pagemill_engine.starting.preparing import ModelFiles
from pagemill_engine.weights.errors import LoadError
from pagemill_kernels.cpu import launch, library
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_kv_blocks": 64, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64,
}  # fmt: skip
BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
MORE: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 24},
    "Gemma2": {"head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 5.0},
    "DeepseekV2": expert_models.MODELS["deepseek-v2"][1] | {"num_hidden_layers": 2},
}
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
Ranks = Callable[..., RankedRunner]


@pytest.fixture(scope="module", params=["Llama", "Olmo2", "Mixtral", "Mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("Llama", tmp_path_factory.mktemp("model"))


def saved(kind: str, folder: Path) -> Path:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**BASE | MORE.get(kind, {}))
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made: list[RankedRunner] = []
    threads = launch.num_threads()

    def load(folder: Path, size: int, stuck_seconds: float = 60.0, **settings: Any) -> RankedRunner:
        config = EngineConfig(model=str(folder), **SETTINGS | settings)
        spec = load_model_spec(folder)
        files = ModelFiles(config, folder, spec, lambda phase, detail: None)
        made.append(load_on_ranks(files, choose_compute(config, spec), size, 1, stuck_seconds))
        return made[-1]

    yield load
    for runner in made:
        runner.close()
    launch.set_num_threads(threads)


class Engine:
    """A core over one runner, for several rounds of requests."""

    def __init__(self, runner: Any, proposals: Proposals | None = None, **settings: Any) -> None:
        self.core = EngineCore(EngineConfig(model="test", **SETTINGS | settings), runner, proposals=proposals)
        self._count = 0
        self.num_preemptions = 0

    def add(self, prompts: list[list[int]], params: SamplingParams) -> list[str]:
        names = [f"r{self._count + index}" for index in range(len(prompts))]
        self._count += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self.core.add(GenerateRequest(request_id=name, model="test", prompt_token_ids=prompt, sampling=params))
        return names

    def run_out(self) -> None:
        while self.core.has_work:
            self.core.step()

    def run(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        """Return the tokens of each choice, and how many log probabilities of its prompt came with them."""
        found: dict[tuple[str, int], tuple[list[int], int]] = {}
        self.add(prompts, params)
        while self.core.has_work:
            for output in self.core.step().outputs:
                assert output.error is None
                self.num_preemptions += output.num_preemptions
                tokens, count = found.get((output.request_id, output.choice), ([], 0))
                both = [*tokens, *output.token_ids], count + len(output.prompt_logprobs)
                found[output.request_id, output.choice] = both
        self.core.check_integrity()
        return [found[key] for key in sorted(found, key=lambda key: (int(key[0][1:]), key[1]))]


def prompts_of(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 131, (length,), generator=generator).tolist() for length in (1, 5, 33, 90, 17, 33)]


ROUNDS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=7, max_tokens=9, ignore_eos=True, presence_penalty=0.5, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, n=2),
]


def answers(runner: Any, **settings: Any) -> list[Any]:
    engine = Engine(runner, **settings)
    found = [engine.run(prompts_of(seed), params) for seed, params in enumerate(ROUNDS)]
    return [*found, engine.run(prompts_of(0), ROUNDS[0])]  # hits of the first round's prefixes


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_give_the_tokens_of_one(folder: Path, size: int, ranks: Ranks, runner_loader: Any) -> None:
    single = runner_loader(folder, **SETTINGS)
    expected = answers(single)
    single.close()
    assert answers(ranks(folder, size)) == expected


@pytest.mark.parametrize(
    "settings", [{"quantization": "int4"}, {"kv_cache_dtype": "int8", "dtype": "bfloat16"}], ids=str
)
def test_ranks_read_their_parts_of_quantized_weights(
    llama: Path, ranks: Ranks, runner_loader: Any, settings: dict[str, Any]
) -> None:
    single = runner_loader(llama, **SETTINGS | settings)
    expected = Engine(single).run(prompts_of(1), ROUNDS[0])
    single.close()
    found = Engine(ranks(llama, 2, **settings)).run(prompts_of(1), ROUNDS[0])
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


@pytest.mark.parametrize("error_rate", [0.0, 0.4])
def test_ranks_verify_proposed_tokens(llama: Path, ranks: Ranks, runner_loader: Any, error_rate: float) -> None:
    prompts = [[5, 6, 7, 8 + index] for index in range(8)]
    single = runner_loader(llama, **SETTINGS)
    expected = Engine(single).run(prompts, LONG)
    single.close()
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
    engine = Engine(ranks(llama, 2), Proposals(oracle(texts, random.Random(4), error_rate, BASE["vocab_size"])))
    assert engine.run(prompts, LONG) == expected
    assert engine.core.num_steps < (30 if error_rate == 0 else 58)


def test_followers_that_wait_use_no_time(llama: Path, ranks: Ranks) -> None:
    runner: Any = ranks(llama, 2)
    Engine(runner).run(prompts_of(1), ROUNDS[0])
    (process,) = map(psutil.Process, runner._followers.ids)
    used, started = sum(process.cpu_times()[:2]), time.monotonic()
    ended = started + 2
    while time.monotonic() < ended:
        assert select.select([], [], [], 0.2) == ([], [], [])
    assert sum(process.cpu_times()[:2]) - used < 0.1


def test_ranks_follow_preemption_overlap_and_sleep(llama: Path, ranks: Ranks, runner_loader: Any) -> None:
    single = runner_loader(llama, **SETTINGS)
    expected = Engine(single).run([[5, 6, 7, 8 + index] for index in range(8)], LONG)
    single.close()
    runner = ranks(llama, 3)
    runner.info = runner.info._replace(num_blocks=12)
    threaded = ThreadedRunner(runner)
    engine = Engine(threaded, overlap=True, enable_prefix_caching=False)
    assert engine.run([[5, 6, 7, 8 + index] for index in range(8)], LONG) == expected
    assert engine.num_preemptions > 0
    assert threaded.sleep() > 0
    threaded.wake()
    assert engine.run([[5, 6, 7, 8 + index] for index in range(8)], LONG) == expected
    threaded._thread.shutdown()


def test_a_plan_that_is_lost_ends_the_engine_with_the_rank_that_lacks_it(llama: Path, ranks: Ranks) -> None:
    runner = ranks(llama, 2, stuck_seconds=1.0)
    engine = Engine(runner)
    engine.add(prompts_of(1), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    engine.core.step()
    runner._send = lambda message: None  # type: ignore[method-assign]
    missing = "rank 1 has not reached a sum outside of the layers of step 2 within 1 s; it was last at cut 3 of layer 1"
    with pytest.raises(RanksLostError, match=missing):
        engine.run_out()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_stops_is_named_within_its_limit(llama: Path, ranks: Ranks, how: signal.Signals) -> None:
    runner = ranks(llama, 3, stuck_seconds=1.0)
    engine = Engine(runner)
    engine.add(prompts_of(1), SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    tokens = sum(len(output.token_ids) for _ in range(6) for output in engine.core.step().outputs)
    assert tokens > 0
    process: Any = runner._followers
    os.kill(process.ids[1], how)
    started = time.monotonic()
    with pytest.raises(RanksLostError) as raised:
        engine.run_out()
    took = time.monotonic() - started
    message = str(raised.value)
    if how == signal.SIGKILL:
        assert "rank 2 (process" in message
        assert "the signal SIGKILL" in message
        assert took < 5
    else:
        os.kill(process.ids[1], signal.SIGCONT)
        assert "rank 2 has not reached" in message
        assert "within 1 s; it was last at" in message
        assert took < 15
    assert "of step" in message or how == signal.SIGKILL
    with pytest.raises(RanksLostError):
        runner.sleep()


def test_a_step_that_raises_on_one_rank_fails_as_a_whole_and_the_next_ones_succeed(
    llama: Path, ranks: Ranks, runner_loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = runner_loader(llama, **SETTINGS)
    expected = Engine(single).run(prompts_of(1), ROUNDS[0])
    single.close()
    monkeypatch.setattr("pagemill_engine.starting.load_ranks.RANK_PROCESS", "failing_rank")
    monkeypatch.setenv("PYTHONPATH", str(Path(failing_rank.__file__).parent))
    monkeypatch.setenv(failing_rank.STEPS, "4,9")
    engine = Engine(ranks(llama, 2, stuck_seconds=10.0))
    engine.add(prompts_of(1), ROUNDS[0])
    errors = []
    while engine.core.has_work:
        errors += [output.error for output in engine.core.step().outputs if output.error]
    assert 1 <= len(errors) <= 6
    assert all("GroupAborted" in error for error in errors)
    engine.core.check_integrity()
    assert engine.run(prompts_of(1), ROUNDS[0]) == expected


def test_a_step_that_raises_on_rank_0_fails_as_a_whole(llama: Path, ranks: Ranks, runner_loader: Any) -> None:
    single = runner_loader(llama, **SETTINGS)
    expected = Engine(single).run(prompts_of(1), ROUNDS[0])
    single.close()
    runner: Any = ranks(llama, 3, stuck_seconds=10.0)
    logits, calls = runner._inner.model.logits, []

    def failing(hidden: Any) -> Any:
        calls.append(len(hidden))
        if len(calls) == 2:
            raise MemoryError("no memory for logits")
        return logits(hidden)

    runner._inner.model.logits = failing
    # Its requests are computed again.
    assert Engine(runner).run(prompts_of(1), ROUNDS[0]) == expected
    assert len(calls) > 2


def test_a_model_that_cannot_be_divided_is_refused(llama: Path, ranks: Ranks) -> None:
    with pytest.raises(LoadError, match="4 attention heads cannot be divided among 5 ranks"):
        ranks(llama, 5)


def test_a_follower_that_cannot_load_says_why(llama: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagemill_engine.starting.load_ranks.RANK_PROCESS", "json.tool")
    with pytest.raises(LoadError, match="Rank 1 did not load its part of the model"):
        ranks(llama, 2)
