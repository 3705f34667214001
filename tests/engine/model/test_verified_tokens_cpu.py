"""Proposed tokens on a real model: every feature of sampling gives the answers of decoding without proposals.

With `deterministic`, sums do not depend on how many tokens a step computes, so answers are compared bit for bit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from oracle_proposer import oracle
from tiny_llama import write_tiny_llama

from pagemill_api.answers.call_syntax import after_reasoning
from pagemill_api.structural_tags import JsonSchema, write_tag
from pagemill_api.structured_params import StructuredOutputsParams
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_engine.kv.integrity import IntegrityError
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.proposing.ngram import Ngrams
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.runners.eager import ThreadedRunner
from pagemill_execution.sampling import runs, sampler
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AFTER_REASONING = write_tag(after_reasoning("<think>", "</think>", JsonSchema(json_schema=PERSON), is_open=True))
FEW = list(range(20, 60))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_p": 0.9},
    "min-p": {"temperature": 1.2, "top_k": 20, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "greedy-penalties": {"temperature": 0.0, "presence_penalty": 1.5, "repetition_penalty": 1.1},
    "min-tokens": {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": FEW[::3], "allowed_token_ids": FEW},
    "stop-tokens": {"temperature": 1.0, "stop_token_ids": FEW[::9], "allowed_token_ids": FEW},
    "bias": {"temperature": 1.0, "logit_bias": {7: 3.0, 9: 4.0, 11: 3.5}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": FEW},
    "bad-words": {
        "temperature": 0.8,
        "allowed_token_ids": [3, 4, 5, 6],
        "bad_word_token_ids": [[3, 4], [5], [6, 3]],
    },
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "choices": {"temperature": 0.8, "n": 3, "logprobs": 1},
    "form": {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(json=PERSON)},
    "form-penalties": {
        "temperature": 1.0,
        "frequency_penalty": 0.3,
        "structured_outputs": StructuredOutputsParams(regex="(abc|abd|xyz){4,9}"),
    },
    "reasoning": {"temperature": 1.0},
    "reasoning-form": {
        "temperature": 1.0,
        "structured_outputs": StructuredOutputsParams(structural_tag=AFTER_REASONING),
    },
}
BUDGET = AnswerFormat(reasoning="think", starts_in_reasoning=True, reasoning_budget=9)
FORMATS = {"reasoning": BUDGET, "reasoning-form": BUDGET}
Answers = dict[tuple[str, int], Any]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Iterator[Tokenizer]:
    found = Tokenizer(load_bundle(smollm2_path))
    yield found
    found.close()


@pytest.fixture(scope="module", params=[False, True], ids=["plain-loop", "overlapped"])
def runner(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: Any, runner_loader: Callable[..., Any]
) -> Iterator[Any]:
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("tiny"), vocab_size=tokenizer.vocab_size, hidden_size=64, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    found = runner_loader(folder, num_kv_blocks=24, max_num_seqs=32, deterministic=True, overlap=request.param)
    yield found
    found.close()


def requests(kinds: list[str]) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=kind,
            model="m",
            prompt_token_ids=[(index * 7 + position) % 64 for position in range(3 + 5 * (index % 4))],
            answer_format=FORMATS.get(kind),
            sampling=SamplingParams(max_tokens=24 + index % 5, seed=index, **KINDS[kind]),
        )
        for index, kind in enumerate(kinds)
    ]


def serve(
    runner: Any,
    tokenizer: Tokenizer,
    proposals: Proposals | None,
    kinds: list[str] | None = None,
    change: Callable[[GenerateRequest], GenerateRequest] = lambda request: request,
) -> tuple[Answers, int]:
    """Return what each choice got, and the number of steps."""
    inner: Any = runner._inner if isinstance(runner, ThreadedRunner) else runner
    inner._rows.release(list(inner._rows._row_of))
    config = EngineConfig(
        model="m", block_size=runner.info.block_size, max_num_seqs=8, max_num_batched_tokens=128,
        overlap=runner.info.overlaps, eos_token_ids=tokenizer.eos_token_ids,
        speculative=SpeculationConfig(method="off"),
    )  # fmt: skip
    core = EngineCore(config, runner, proposals=proposals)
    core.grammar_requests.load_tokenizer = lambda: tokenizer
    for request in requests(kinds or list(KINDS)):
        core.add(change(request))
    answers: Answers = {}
    while core.has_work:
        for output in core.step().outputs:
            answer = answers.setdefault((output.request_id, output.choice), {"token_ids": [], "logprobs": []})
            answer["token_ids"] += output.token_ids
            answer["logprobs"] += output.logprobs or []
            answer["finish_reason"], answer["error"] = output.finish_reason, output.error
        core.check_integrity()
    return answers, core.num_steps


@pytest.fixture(scope="module")
def plain(runner: Any, tokenizer: Tokenizer) -> tuple[Answers, int]:
    answers, num_steps = serve(runner, tokenizer, None)
    assert not [answer["error"] for answer in answers.values() if answer["error"]]
    return answers, num_steps


@pytest.fixture(scope="module")
def texts(plain: tuple[Answers, int]) -> list[list[int]]:
    prompts = {request.request_id: request.prompt_token_ids for request in requests(list(KINDS))}
    return [prompts[name] + answer["token_ids"] for (name, _), answer in plain[0].items()]


def with_oracle(texts: list[list[int]], error_rate: float, vocab_size: int) -> Proposals:
    return Proposals([oracle(texts, random.Random(5), error_rate, vocab_size)])


@pytest.mark.parametrize("error_rate", [0.0, 0.15, 0.5])
def test_every_feature_gives_the_answers_of_decoding_without_proposals(
    runner: Any, tokenizer: Tokenizer, plain: tuple[Answers, int], texts: list[list[int]], error_rate: float
) -> None:
    found, num_steps = serve(runner, tokenizer, with_oracle(texts, error_rate, tokenizer.vocab_size))
    assert found == plain[0]
    if not error_rate:
        assert num_steps < (0.9 if runner.info.overlaps else 0.7) * plain[1], "proposals were verified"


class AlwaysMost(random.Random):
    def randint(self, a: int, b: int) -> int:
        return b


def test_a_form_behind_the_reasoning_holds_for_proposals_of_the_same_step(
    runner: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the form forbids what is proposed behind the reasoning."""
    kind, budget = "reasoning-form", 6

    def change(request: GenerateRequest) -> GenerateRequest:
        ends_soon = msgspec.structs.replace(BUDGET, reasoning_budget=budget)
        return msgspec.structs.replace(request, answer_format=ends_soon)

    plain, _ = serve(runner, tokenizer, None, [kind], change)
    answer = plain[kind, 0]["token_ids"]
    text = tokenizer.decode(answer)
    assert re.match(r"\s*{\s*\"name", text.split("</think>")[1]), text
    end = budget + len(tokenizer.encode("</think>", add_special_tokens=False))
    prompt = requests([kind])[0].prompt_token_ids
    runs: list[tuple[int, int]] = []
    sound = EngineCore.step

    def step(core: EngineCore) -> Any:
        result = sound(core)
        for output in result.outputs:
            first = runs[-1][1] if runs else 0
            runs.append((first, first + len(output.token_ids)))
        return result

    monkeypatch.setattr(EngineCore, "step", step)
    for wrong in (None, end):
        proposed = [token if place != wrong else 7 for place, token in enumerate(answer)]
        method = oracle([prompt + proposed], AlwaysMost(), 0.0, tokenizer.vocab_size)
        runs.clear()
        found, _ = serve(runner, tokenizer, Proposals([method], 10), [kind], change)
        assert found == plain
        if wrong is None:
            assert any(first < budget and last > end for first, last in runs), runs


def test_an_end_at_the_last_token_within_a_run_is_no_length(runner: Any, tokenizer: Tokenizer) -> None:
    plain, _ = serve(runner, tokenizer, None, ["drawn"])
    answer = plain["drawn", 0]["token_ids"]
    place = next(place for place in range(8, 20) if answer[place] not in answer[:place])
    prompt = requests(["drawn"])[0].prompt_token_ids

    def ends(max_tokens: int) -> tuple[int, str, int]:
        def change(request: GenerateRequest) -> GenerateRequest:
            limits = {"max_tokens": max_tokens, "stop_token_ids": [answer[place]]}
            return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **limits))

        proposals = with_oracle([prompt + answer], 0.0, tokenizer.vocab_size)
        found, num_steps = serve(runner, tokenizer, proposals, ["drawn"], change)
        return len(found["drawn", 0]["token_ids"]), found["drawn", 0]["finish_reason"], num_steps

    assert ends(place + 1)[:2] == ends(place + 2)[:2] == (place + 1, "stop")
    assert ends(place)[:2] == (place, "length")
    assert ends(place + 2)[2] < place, "proposals were verified"


def test_ngrams_give_the_answers_of_decoding_without_proposals(
    runner: Any, tokenizer: Tokenizer, plain: tuple[Answers, int]
) -> None:
    found, num_steps = serve(runner, tokenizer, Proposals([Ngrams()]))
    assert found == plain[0]
    assert num_steps <= plain[1]


def is_found(runner: Any, tokenizer: Tokenizer, plain: tuple[Answers, int], texts: list[list[int]]) -> bool:
    """Whether answers show that something is wrong."""
    try:
        found, _ = serve(runner, tokenizer, with_oracle(texts, 0.15, tokenizer.vocab_size))
    except (IntegrityError, ValueError):
        return True
    return found != plain[0]


def test_the_faults_of_a_verifier_are_found(
    runner: Any,
    tokenizer: Tokenizer,
    plain: tuple[Answers, int],
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound, sound_masks = sampler.sample, sampler.mask_rows

    def at_the_first_position(logits: Any, sampling: Any, rows: Any, num_generated: Any, masks: Any = None) -> Any:
        _, first = np.unique(rows, return_index=True)
        starts = dict(zip(rows[first].tolist(), num_generated[first].tolist(), strict=True))
        same = np.array([starts[row] for row in rows.tolist()])
        return sound(logits, sampling, rows, same, masks)

    def without_rounds(logits: Any, sampling: Any, rows: Any, *rest: Any) -> Any:
        before, sampling.penalised = sampling.penalised, np.zeros_like(sampling.penalised)
        try:
            return sound(logits, sampling, rows, *rest)
        finally:
            sampling.penalised = before

    def masks_before(masks: list[Any]) -> Any:
        return sound_masks([masks[0], *masks[:-1]])

    for fault in (
        ("sample", at_the_first_position),
        ("sample", without_rounds),
        ("mask_rows", masks_before),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(runs, *fault)
            assert is_found(runner, tokenizer, plain, texts), fault
    with monkeypatch.context() as patched:
        patched.setattr(CacheManager, "withdraw", lambda self, sequence, num_tokens: None)
        with pytest.raises(Exception, match="tokens"):
            serve(runner, tokenizer, with_oracle(texts, 0.5, tokenizer.vocab_size))
    assert not is_found(runner, tokenizer, plain, texts), "the faults are gone"


def with_predictions(texts: dict[str, list[int]]) -> Callable[[GenerateRequest], GenerateRequest]:
    """Let clients predict their answers, with every ninth token wrong."""

    def predicted(request: GenerateRequest) -> GenerateRequest:
        answer = texts[request.request_id]
        wrong = [token_id if place % 9 != 8 else (token_id + 1) % 64 for place, token_id in enumerate(answer)]
        return msgspec.structs.replace(request, predicted_token_ids=wrong)

    return predicted


def test_predictions_of_clients_change_no_answer(runner: Any, tokenizer: Tokenizer, plain: tuple[Answers, int]) -> None:
    first = {name: answer["token_ids"] for (name, _), answer in reversed(plain[0].items())}
    found, _ = serve(runner, tokenizer, Proposals([]), change=with_predictions(first))
    assert found == plain[0]
    kinds = ["drawn", "penalties"]
    alone, num_plain = serve(runner, tokenizer, None, kinds)
    texts = {name: answer["token_ids"] for (name, _), answer in alone.items()}
    found, num_steps = serve(runner, tokenizer, Proposals([]), kinds, with_predictions(texts))
    assert found == alone
    assert num_steps < 0.6 * num_plain, "predictions were verified"


def test_another_engine_goes_on_with_a_prediction(
    runner: Any, tokenizer: Tokenizer, plain: tuple[Answers, int]
) -> None:
    """A request that moves has its prediction and the tokens so far; the rest is as it was."""
    kinds = ["greedy", "min-p", "bias", "bad-words"]
    alone, _ = serve(runner, tokenizer, None, kinds)
    texts = {name: answer["token_ids"] for (name, _), answer in alone.items()}

    def moved(request: GenerateRequest) -> GenerateRequest:
        resume = [ChoiceResume(0, texts[request.request_id][:7], 0)]
        return msgspec.structs.replace(with_predictions(texts)(request), resume=resume)

    found, num_steps = serve(runner, tokenizer, Proposals([]), kinds, moved)
    assert {name: answer["token_ids"] for (name, _), answer in found.items()} == {
        name: tokens[7:] for name, tokens in texts.items()
    }
    assert num_steps < 13, "for 17 tokens and more"
