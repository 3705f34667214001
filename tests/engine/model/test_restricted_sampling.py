"""Allowed tokens, bad words, and log probabilities of named tokens, on the CPU and with Triton, in both loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import write_tiny_llama

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import LogprobsOut
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners.device.device_runner import DeviceRunner
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

VOCAB_SIZE = 64
PROMPT = list(range(7))
NUM_TOKENS = 8
Answer = tuple[list[int], list[LogprobsOut]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=16, num_hidden_layers=1)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def runner(folder: Path, request: pytest.FixtureRequest, runner_loader: Callable[..., Any]) -> Iterator[Any]:
    """Return a runner; without a GPU, `cuda` runs in Triton's interpreter."""
    runner = runner_loader(folder, num_kv_blocks=12, max_model_len=64, max_num_seqs=4, device=request.param)
    assert isinstance(runner, DeviceRunner) == (request.param == "cuda")
    yield runner
    runner.close()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=5, **{"temperature": 0.0, **fields})


def serve(runner: Any, *samplings: SamplingParams, overlap: bool = False, **fields: Any) -> list[Answer]:
    core = EngineCore(EngineConfig(model="m", max_num_seqs=4, overlap=overlap), runner)
    answers: dict[str, Answer] = {}
    for index, sampling in enumerate(samplings):
        answers[f"r{index}"] = ([], [])
        core.add(
            GenerateRequest(request_id=f"r{index}", model="m", prompt_token_ids=PROMPT, sampling=sampling, **fields)
        )
    while core.has_work:
        for out in core.step().outputs:
            assert out.error is None
            answers[out.request_id][0].extend(out.token_ids)
            answers[out.request_id][1].extend(out.logprobs or [])
    core.check_integrity()
    runner._rows.release(list(runner._rows._row_of))
    return list(answers.values())


def contains(token_ids: list[int], word: list[int]) -> bool:
    return any(token_ids[at : at + len(word)] == word for at in range(len(token_ids)))


@pytest.mark.sample("cpu-*", "cuda-1.5")
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_are_sampled_and_other_rows_are_unaffected(runner: Any, temperature: float) -> None:
    plain = params(temperature=temperature)
    alone, _ = serve(runner, plain)[0]
    allowed = sorted(set(range(VOCAB_SIZE)) - set(alone))[:9]
    (restricted, _), (beside, _) = serve(runner, params(temperature=temperature, allowed_token_ids=allowed), plain)
    assert set(restricted) <= set(allowed)
    assert beside == alone


def test_a_bias_applies_among_allowed_tokens(runner: Any) -> None:
    answer, _ = serve(runner, params(allowed_token_ids=[3, 40, 41], logit_bias={41: 100.0, 5: 100.0}))[0]
    assert answer == [41] * NUM_TOKENS


@pytest.mark.sample("*-1-plain", "*-3-overlapped")
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_bad_word_is_never_completed(runner: Any, overlap: bool, length: int) -> None:
    alone, _ = serve(runner, params())[0]
    word = alone[4 : 4 + length]
    (answer, _), (beside, _) = serve(runner, params(bad_word_token_ids=[word]), params(), overlap=overlap)
    assert contains(alone, word)
    assert not contains(answer, word)
    first = next(at for at in range(NUM_TOKENS) if alone[at : at + length] == word) + length - 1
    assert answer[:first] == alone[:first], "tokens before the word must not change"
    assert beside == alone


def test_a_word_that_began_on_another_engine_is_not_completed(runner: Any) -> None:
    alone, _ = serve(runner, params())[0]
    word = alone[3:6]
    sampling = params(bad_word_token_ids=[word])
    rest, _ = serve(runner, sampling, resume=[ChoiceResume(0, alone[:5], 0)])[0]
    assert rest[0] != word[-1]
    assert not contains([*alone[:5], *rest], word)


def test_words_in_the_prompt_do_not_count(runner: Any) -> None:
    alone, _ = serve(runner, params())[0]
    across = [PROMPT[-1], alone[0]]
    answer, _ = serve(runner, params(bad_word_token_ids=[across]))[0]
    assert answer[0] == alone[0]


def test_named_tokens_are_reported_instead_of_the_most_likely(runner: Any) -> None:
    (alone, top), (_, plain_top) = serve(runner, params(logprobs=20), params(logprobs=2))
    named = [*top[0].token_ids[15:18], top[0].token_ids[1]]
    (answer, entries), (beside, beside_entries) = serve(
        runner, params(logprob_token_ids=named, logprobs=2), params(logprobs=2)
    )
    assert (answer, beside) == (alone, alone)
    assert [entry.token_ids for entry in entries] == [[token_id, *named] for token_id in alone]
    known = dict(zip(top[0].token_ids, top[0].logprobs, strict=True))
    assert entries[0].logprobs == pytest.approx([known[alone[0]], *(known[each] for each in named)], abs=1e-5)
    assert [entry.rank for entry in entries] == [entry.rank for entry in top]
    assert [entry.token_ids for entry in beside_entries] == [entry.token_ids for entry in plain_top]


def test_before_the_minimum_an_end_token_is_not_the_only_allowed_one(runner: Any) -> None:
    core = EngineCore(EngineConfig(model="m", eos_token_ids=[2]), runner)
    sampling = SamplingParams(allowed_token_ids=[2], min_tokens=1)
    with pytest.raises(PagemillError, match=r"leave no token that may follow\. Remove one of them") as refused:
        core.add(GenerateRequest(request_id="r", model="m", prompt_token_ids=PROMPT, sampling=sampling))
    assert refused.value.param == "allowed_token_ids"


def test_allowed_tokens_and_bad_words_apply_together(runner: Any) -> None:
    sampling = params(allowed_token_ids=[3, 40, 41], bad_word_token_ids=[[41], [3, 3], [40, 40]])
    answer, _ = serve(runner, sampling)[0]
    assert answer in ([3, 40] * (NUM_TOKENS // 2), [40, 3] * (NUM_TOKENS // 2))


def test_an_answer_without_a_possible_next_token_ends_with_the_reason(runner: Any) -> None:
    core = EngineCore(EngineConfig(model="m", max_num_seqs=4), runner)
    sampling = params(allowed_token_ids=[3], bad_word_token_ids=[[3, 3, 3]])
    core.add(GenerateRequest(request_id="r", model="m", prompt_token_ids=PROMPT, sampling=sampling))
    outputs = [out for _ in range(4) for out in core.step().outputs]
    assert [out.token_ids for out in outputs] == [[3], []]
    assert outputs[-1].finish_reason == "error"
    assert "leave no token that may follow" in outputs[-1].error
    core.check_integrity()
    runner._rows.release(list(runner._rows._row_of))


@pytest.mark.parametrize("fields", [{"allowed_token_ids": [3], "bad_words": ["x"]}, {"allowed_token_ids": [2]}])
def test_an_answer_without_a_possible_first_token_is_refused(runner: Any, fields: dict[str, Any]) -> None:
    core = EngineCore(EngineConfig(model="m", eos_token_ids=[2]), runner)
    sampling = SamplingParams(min_tokens=1, bad_word_token_ids=[[3]] if "bad_words" in fields else [], **fields)
    with pytest.raises(PagemillError, match="leave no token") as refused:
        core.add(GenerateRequest(request_id="r", model="m", prompt_token_ids=PROMPT, sampling=sampling))
    assert refused.value.param == "allowed_token_ids"
    assert not core.has_work


@pytest.mark.sample("*-31", "*-63")
@pytest.mark.parametrize("token_id", [0, 31, 32, 63])
def test_masks_have_the_size_of_the_vocabulary(runner: Any, token_id: int) -> None:
    assert serve(runner, params(allowed_token_ids=[token_id]))[0][0] == [token_id] * NUM_TOKENS
