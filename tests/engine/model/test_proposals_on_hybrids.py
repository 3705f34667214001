"""Proposed tokens on hybrids: with `deterministic`, answers and kept states are those without, bit for bit.

One model for each kind of state verifies what an oracle proposes, with errors at random places, and what clients
predict, while prompts are cut, requests preempted, forked and continued by another engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from adapter_engine import Engine as AdapterEngine
from cut_kinds import with_blocks
from hybrid_models import ALL, check_greedy, prompts_of, write_hybrid
from hybrid_requests import KINDS, Answers, Change, requests_of, take
from oracle_proposer import oracle
from peft_adapters import ATTENTION, Base, write_adapter
from ranked_engine import LONG, SETTINGS, Engine, Ranks

from pagemill_api.structured_params import StructuredOutputsParams
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_engine.kv.integrity import IntegrityError
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.decoders.step_model import StateArrays
from pagemill_execution.runners.eager import ThreadedRunner
from pagemill_execution.runners.inputs import StateRows
from pagemill_kernels.cpu import library
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest

pytestmark = [
    pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}"),
    pytest.mark.slow,
]
MOST = 16
ROOM = SpeculationConfig(method="ngram", num_tokens=MOST)
PLACE = {
    "type": "object",
    "properties": {"first name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
    "required": ["first name", "age"],
    "additionalProperties": False,
}
REQUESTS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (40, {"temperature": 0.0, "max_tokens": 70}),
    "drawn": (75, {"temperature": 0.9, "top_p": 0.9, "n": 3, "logprobs": 2}),
    "penalties": (5, {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 1}),
    "form": (33, {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(json=PLACE), "max_tokens": 60}),
    "words": (17, {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="(abc|abd|xyz){4,9}")}),
    "short": (16, {"temperature": 0.6, "max_tokens": 30}),
}
"""By name: the length of the prompt, and what is asked for."""


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Iterator[Tokenizer]:
    found = Tokenizer(load_bundle(smollm2_path))
    yield found
    found.close()


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: Any) -> Path:
    made: Path = tmp_path_factory.mktemp("hybrid")
    write_hybrid(*KINDS[request.param], made, tokenizer.vocab_size)
    return made


@pytest.fixture(scope="module", params=[False, True], ids=["plain-loop", "overlapped"])
def runner(request: pytest.FixtureRequest, folder: Path, runner_loader: Callable[..., Any]) -> Iterator[Any]:
    found = runner_loader(folder, deterministic=True, speculative=ROOM, max_num_seqs=16, overlap=request.param)
    spoil(found)
    yield found
    found.close()


def inner(runner: Any) -> Any:
    return runner._inner if isinstance(runner, ThreadedRunner) else runner


def spoil(runner: Any) -> None:
    """Overwrite what no step has written."""
    for cache in inner(runner).kv_cache.layers:
        if isinstance(cache, StateArrays):
            cache.log[:] = cache.inputs[:] = np.nan


def requests() -> list[GenerateRequest]:
    return requests_of(REQUESTS, max_tokens=40)


class Served:
    """A core that serves all requests once."""

    def __init__(
        self,
        runner: Any,
        tokenizer: Tokenizer,
        proposals: Proposals | None,
        change: Change = lambda request: request,
        num_blocks: int = 512,
        **more: Any,
    ) -> None:
        info = runner.info
        inner(runner)._rows.release(list(inner(runner)._rows._row_of))
        runner.info = with_blocks(info, num_blocks)._replace(step=None)
        config = EngineConfig(
            model="m", block_size=info.block_size, eos_token_ids=tokenizer.eos_token_ids, overlap=info.overlaps,
            **{"max_num_seqs": 8, **more},
        )  # fmt: skip
        self.runner = runner
        try:
            self.core = EngineCore(config, runner, proposals=proposals)
        finally:
            runner.info = info
        self.core.grammar_requests.load_tokenizer = lambda: tokenizer
        self.num_preempted = self.num_cached = 0
        self.answers = self.serve(change)

    def serve(self, change: Change = lambda request: request) -> Answers:
        answers: Answers = {}
        for request in requests():
            self.core.add(change(request))
        while self.core.has_work:
            for output in self.core.step().outputs:
                take(answers, output)
                self.num_preempted += output.num_preemptions
                self.num_cached += output.num_cached_tokens > 0
            self.core.check_integrity()
        return answers

    def states(self) -> dict[bytes, bytes]:
        """Return the contents of the states in the prefix cache, by their hashes."""
        states = inner(self.runner).kv_cache.of_kinds[-1]
        found = self.core.scheduler.kv.caches[-1].prefixes.items()
        return {name: states.contents([block.block_id]).tobytes() for name, block in found}


@pytest.fixture(scope="module")
def plain(runner: Any, tokenizer: Tokenizer) -> Served:
    served = Served(runner, tokenizer, None)
    served.kept = served.states()  # type: ignore[attr-defined]
    assert not [answer["error"] for answer in served.answers.values() if answer["error"]]
    return served


@pytest.fixture(scope="module")
def texts(plain: Served) -> list[list[int]]:
    prompts = {request.request_id: request.prompt_token_ids for request in requests()}
    return [prompts[name] + answer["token_ids"] for (name, _), answer in plain.answers.items()]


@pytest.fixture
def proposals(texts: list[list[int]], tokenizer: Tokenizer) -> Callable[[float], Proposals]:
    return lambda error_rate: Proposals([oracle(texts, random.Random(5), error_rate, tokenizer.vocab_size)], MOST)


Oracle = Callable[[float], Proposals]


@pytest.mark.sample("plain-loop-delta rule-0.15", "overlapped-state space-0.5", "overlapped-short convolution-0.0")
@pytest.mark.parametrize("error_rate", [0.0, 0.15, 0.5])
def test_answers_and_states_are_those_without_proposals(
    runner: Any, tokenizer: Tokenizer, plain: Served, proposals: Oracle, error_rate: float
) -> None:
    spoil(runner)
    found = Served(runner, tokenizer, proposals(error_rate))
    assert found.answers == plain.answers
    kept, own = found.states(), plain.kept  # type: ignore[attr-defined]
    assert len(kept.keys() & own.keys()) >= 6
    assert all(kept[name] == own[name] for name in kept.keys() & own.keys()), "a state has a rejected token"
    if not error_rate:
        assert found.core.num_steps < 0.7 * plain.core.num_steps, "proposals were verified"
    again = found.serve()
    assert again == plain.answers
    assert found.num_cached >= 3


@pytest.mark.sample("overlapped-delta rule", "plain-loop-state space")
def test_answers_are_the_same_in_chunks_and_preempted(
    runner: Any, tokenizer: Tokenizer, plain: Served, proposals: Oracle
) -> None:
    chunked = Served(runner, tokenizer, proposals(0.3), max_num_batched_tokens=19, max_num_seqs=4)
    assert chunked.answers == plain.answers
    for caching in (True, False):
        few = Served(runner, tokenizer, proposals(0.3), num_blocks=11, enable_prefix_caching=caching)
        assert few.answers == plain.answers
        assert few.num_preempted


@pytest.mark.sample("plain-loop-delta rule", "overlapped-short convolution")
def test_another_engine_goes_on_with_predictions(runner: Any, tokenizer: Tokenizer, plain: Served) -> None:
    """Also with what the clients predict, of which every ninth token is wrong."""
    answers = plain.answers

    def predicted(request: GenerateRequest) -> GenerateRequest:
        tokens = answers[request.request_id, 0]["token_ids"]
        wrong = [token_id if place % 9 != 8 else (token_id + 1) % 64 for place, token_id in enumerate(tokens)]
        return msgspec.structs.replace(request, predicted_token_ids=wrong)

    def moved(request: GenerateRequest) -> GenerateRequest:
        own = [answer["token_ids"][:7] for (name, _), answer in answers.items() if name == request.request_id]
        resume = [ChoiceResume(choice, tokens, 0) for choice, tokens in enumerate(own)]
        return msgspec.structs.replace(predicted(request), resume=resume)

    found = Served(runner, tokenizer, Proposals([], MOST), predicted)
    assert found.answers == answers
    assert found.core.num_steps < plain.core.num_steps
    resumed = Served(runner, tokenizer, Proposals([], MOST), moved)
    for key, answer in answers.items():
        assert resumed.answers[key]["token_ids"] == answer["token_ids"][7:]


@pytest.mark.sample("kimi-linear", "qwen3.5-moe")
@pytest.mark.parametrize("name", ALL)
def test_greedy_answers_equal_transformers(name: str, tmp_path: Path, runner_loader: Callable[..., Any]) -> None:
    """Also without `deterministic`, as the two best tokens differ enough."""
    reference = write_hybrid(*ALL[name], tmp_path)
    loaded = runner_loader(tmp_path, speculative=ROOM, max_num_seqs=8)
    spoil(loaded)
    prompts = prompts_of((17, 40, 90))
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, Engine(loaded).run(prompts, LONG), strict=True)]
    for error_rate in (0.0, 0.3):
        engine = Engine(loaded, Proposals([oracle(texts, random.Random(4), error_rate, 90)], MOST))
        for prompt, (tokens, _) in zip(prompts, engine.run(prompts, LONG), strict=True):
            check_greedy(reference, prompt, tokens)
        assert engine.core.num_steps < 40, "for 60 tokens each"


@pytest.mark.sample("qwen3.5-2")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "lfm2"])
def test_ranks_verify_proposed_tokens(
    name: str, size: int, tmp_path: Path, ranks: Ranks, runner_loader: Callable[..., Any]
) -> None:
    """Processes that divide heads with states follow what rank 0 accepts, also in chunks and choices."""
    write_hybrid(*ALL[name], tmp_path)
    prompts, params = prompts_of((1, 17, 40, 90)), [LONG, msgspec.structs.replace(LONG, n=2, temperature=0.8, seed=3)]
    single = runner_loader(tmp_path, **SETTINGS | {"num_kv_blocks": 256})
    expected = [Engine(single).run(prompts, each) for each in params]
    single.close()
    texts: list[list[int]] = []
    for answered in expected:
        choices = len(answered) // len(prompts)
        texts += [prompts[number // choices] + tokens for number, (tokens, _) in enumerate(answered)]
    runner = ranks(tmp_path, size, num_kv_blocks=256, speculative=ROOM)
    engine = Engine(runner, Proposals([oracle(texts, random.Random(4), 0.3, 90)], MOST))
    assert [engine.run(prompts, each) for each in params] == expected
    assert engine.core.num_steps < 80, "for two times 60 tokens each"


def test_rows_with_adapters_verify_proposed_tokens(tmp_path: Path) -> None:
    base = Base(tmp_path, write_hybrid(*ALL["qwen3.5"], tmp_path))
    parts = ["in_proj_qkv", "in_proj_b", "out_proj", *ATTENTION]
    adapters = [write_adapter(base, tmp_path / str(seed), seed, target_modules=parts).folder for seed in (1, 2)]
    prompts = [[(7 * index + 11 * place * place) % 90 for place in range(20 + index)] for index in range(6)]
    plain = AdapterEngine(tmp_path, speculative=SpeculationConfig(method="off"))
    engine = AdapterEngine(tmp_path, speculative=ROOM)
    digests = [["", *(each.load(folder) for folder in adapters)] * 2 for each in (plain, engine)]
    expected = plain.greedy(prompts, digests[0], 40)
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    core = engine.core
    assert core.scheduler._proposals is not None
    core.scheduler._proposals = Proposals([oracle(texts, random.Random(4), 0.3, 90)], MOST)
    assert engine.greedy(prompts, digests[1], 40) == expected
    assert core.num_steps < 30, "for 40 tokens each"


def stale_counts(before: list[Any]) -> Callable[[StateBatch], StateBatch]:
    def change(batch: StateBatch) -> StateBatch:
        before.append(batch.num_accepted)
        stale = before[-2] if len(before) > 1 else None
        return batch._replace(num_accepted=stale if stale is None or len(stale) == len(batch.rows) else None)

    return change


FAULTS: dict[str, Callable[[], Callable[[StateBatch], StateBatch]]] = {
    "a rejected token is left in the log": lambda: (
        lambda batch: batch._replace(
            num_logged=batch.num_logged + (0 if batch.num_accepted is None else (batch.num_accepted > 0))
        )
    ),
    "a window is one token late": lambda: (
        lambda batch: batch._replace(
            num_accepted=None if batch.num_accepted is None else np.maximum(batch.num_accepted - 1, 0)
        )
    ),
    "the count of accepted tokens is that of the step before": lambda: stale_counts([]),
}


@pytest.mark.sample("overlapped-delta rule-*", "overlapped-short convolution-a window is one token late")
@pytest.mark.parametrize("fault", [*FAULTS, "a state is folded with a rejected token"])
def test_planted_faults_are_found(
    runner: Any, tokenizer: Tokenizer, plain: Served, proposals: Oracle, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_log = any(cache.log.size for cache in inner(runner).kv_cache.layers if isinstance(cache, StateArrays))
    if "log" in fault and not has_log:
        pytest.skip("a convolution alone has no log; its count of tokens only places windows, which hits read")
    gather, extend = StateRows.gather, CacheManager._extend
    if fault in FAULTS:
        change = FAULTS[fault]()
        monkeypatch.setattr(StateRows, "gather", lambda rows, *inputs: change(gather(rows, *inputs)))
    else:
        monkeypatch.setattr(CacheManager, "_extend", lambda kv, table, start, end, _: extend(kv, table, start, end, 0))
    try:
        found = Served(runner, tokenizer, proposals(0.15))
    except (IntegrityError, RuntimeError):
        return
    assert found.answers != plain.answers
