"""Stages that compute a model one behind the other give the tokens of one process, each busy with another step."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from oracle_proposer import oracle
from ranked_engine import BASE, LONG, ROUNDS, SETTINGS, Engine, Ranks, answers, prompts_of, saved

from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.runners.ranks.ranked import RanksLostError
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu import library
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
NUM_LAYERS = 3
TWO = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True, allowed_token_ids=[5, 6])
FIRST = [[5, 6, 7, 8 + index] for index in range(8)]


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("Llama", tmp_path_factory.mktemp("model"), num_hidden_layers=NUM_LAYERS)


@pytest.mark.sample("Llama-3-3", "Mistral-4-2", "Mixtral-2-2")  # Gemma2 in three stages: the test below
@pytest.mark.parametrize(("size", "num_stages"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("kind", ["Llama", "Olmo2", "Mixtral", "Mistral", "Gemma2"])
def test_stages_give_the_tokens_of_one(
    kind: str, tmp_path: Path, ranks: Ranks, runner_loader: Any, size: int, num_stages: int
) -> None:
    """Rounds of requests with chunked prompts, log probabilities, several choices and prefix hits."""
    folder = saved(kind, tmp_path, num_hidden_layers=NUM_LAYERS)
    single = runner_loader(folder, **SETTINGS)
    expected = answers(single)
    single.close()
    assert answers(ranks(folder, size, num_stages=num_stages)) == expected


def test_stages_have_windows_and_full_attention_of_their_own(tmp_path: Path, ranks: Ranks, runner_loader: Any) -> None:
    """The first stage has no layer of the kind that keeps everything."""
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    folder = saved("Gemma2", tmp_path, num_hidden_layers=NUM_LAYERS, layer_types=types)
    settings = {"num_kv_blocks": 128, "max_num_seqs": 4}
    single = runner_loader(folder, **SETTINGS | settings)
    assert len(single.info.kinds) == 2
    expected = answers(single)
    single.close()
    assert answers(ranks(folder, 3, num_stages=3, **settings)) == expected


@pytest.mark.sample("3-3")
@pytest.mark.parametrize(("size", "num_stages"), [(2, 2), (3, 3)])
def test_stages_follow_preemption_and_sleep(
    three_layers: Path, ranks: Ranks, runner_loader: Any, size: int, num_stages: int
) -> None:
    single = runner_loader(three_layers, **SETTINGS)
    expected = Engine(single).run(FIRST, LONG)
    single.close()
    runner = ranks(three_layers, size, num_stages=num_stages)
    runner.info = runner.info._replace(num_blocks=12)
    engine = Engine(runner)
    assert engine.run(FIRST, LONG) == expected
    assert engine.num_preemptions > 0
    assert runner.sleep() > 0
    runner.wake()
    engine.core.scheduler.kv.reset_prefix_cache()
    assert engine.run(FIRST, LONG) == expected


def test_every_stage_has_a_step(three_layers: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps are in flight as there are stages, each with an equal part of the decodes, and one more while
    prompts are computed."""
    engine = Engine(ranks(three_layers, 3, num_stages=3, max_num_batched_tokens=16))
    schedule, plans = engine.core.scheduler.schedule, []

    def noted() -> Any:
        plan = schedule()
        num_decodes = sum(1 for name, count in plan.num_scheduled_tokens.items() if name in plan.samples and count == 1)
        plans.append((len(engine.core._in_flight), num_decodes, plan.num_tokens))
        return plan

    monkeypatch.setattr(engine.core.scheduler, "schedule", noted)
    assert engine.run(prompts_of(1)[1:] * 3, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert max(num_decodes for _, num_decodes, _ in plans) == 3  # of eight that run
    assert any(ahead == 2 and num_decodes for ahead, num_decodes, _ in plans)
    assert any(ahead == 3 and num_tokens for ahead, _, num_tokens in plans)


@pytest.mark.parametrize(("size", "num_stages", "error_rate"), [
    pytest.param(3, 3, 0.0, marks=pytest.mark.full),
    (3, 3, 0.4),
    pytest.param(4, 2, 0.4, marks=pytest.mark.slow),
])  # fmt: skip
def test_stages_verify_proposed_tokens(
    three_layers: Path, ranks: Ranks, runner_loader: Any, size: int, num_stages: int, error_rate: float
) -> None:
    """An oracle's, clients' predictions and n-grams; a stage that ends meanwhile is named."""
    prompts, single = FIRST[:4], runner_loader(three_layers, deterministic=True, **SETTINGS)
    expected = [Engine(single).run(prompts, params) for params in (LONG, ROUNDS[1], TWO)]
    single.close()
    runner: Any = ranks(three_layers, size, num_stages=num_stages, deterministic=True)
    for params, found in zip((LONG, ROUNDS[1]), expected, strict=False):
        texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, found, strict=True)]
        engine = Engine(runner, Proposals([oracle(texts, random.Random(4), error_rate, BASE["vocab_size"])]))
        assert engine.run(prompts, params) == found
        assert engine.num_accepted > len(prompts)
    predicting = Engine(runner, speculative=SpeculationConfig(method="ngram"))
    assert predicting.core._proposals is not None
    predicting.core._proposals._ms_of = None  # as many as are found: what they gain depends on this machine's times
    for index, (prompt, (tokens, _)) in enumerate(zip(prompts, expected[0], strict=True)):
        predicted = tokens[:20] if index % 2 else []
        predicting.core.add(GenerateRequest(
            request_id=f"r{index}", model="test", prompt_token_ids=prompt, sampling=LONG, predicted_token_ids=predicted
        ))  # fmt: skip
    assert predicting.run([], LONG) == expected[0]
    assert predicting.num_accepted > 15 * len(prompts) // 2
    predicting.num_accepted = 0
    assert [tokens for tokens, _ in predicting.run(prompts, TWO)] == [tokens for tokens, _ in expected[2]]
    assert predicting.num_accepted > 10 * len(prompts), "n-grams of two tokens are often right"
    first = runner._followers.ids[-1]
    predicting.add(prompts, TWO)
    predicting.core.step()
    predicting.core.step()
    os.kill(first, signal.SIGKILL)
    with pytest.raises(RanksLostError, match=rf"rank {size - 1} \(process {first}\) ended with the signal SIGKILL"):
        predicting.run_out()


def test_stages_that_cannot_be_are_refused(three_layers: Path, ranks: Ranks) -> None:
    with pytest.raises(
        LoadError, match=r"3 layers cannot be divided into 4 stages\. Lower pipelineParallel to at most 3"
    ):
        ranks(three_layers, 4, num_stages=4)
