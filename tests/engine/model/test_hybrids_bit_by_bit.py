"""Hybrids with `deterministic`: requests of every kind get the same bits however they are computed.

One model for each kind of state serves forms, choices, penalties and log probabilities in whole prompts and in chunks,
preempted, with states of the prefix cache, and continued by another engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from cut_kinds import with_blocks
from hybrid_models import OTHERS, write_hybrid
from hybrid_requests import KINDS, Answers, Change, requests_of, take

from pagemill_api.structured_params import StructuredOutputsParams
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_kernels.cpu import library
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest

pytestmark = [
    pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}"),
    pytest.mark.slow,
]
PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99}, "y": {"enum": ["a", "b"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
FORM, WORDS = StructuredOutputsParams(json=PLACE), "(abc|abd|xyz){2,4}"
REQUESTS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (40, {"temperature": 0.0, "logprobs": 1}),
    "drawn": (75, {"temperature": 0.9, "top_p": 0.9, "n": 3, "logprobs": 2}),
    "penalties": (5, {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 1}),
    "form": (33, {"temperature": 1.0, "structured_outputs": FORM, "logprobs": 1, "max_tokens": 60}),
    "words": (17, {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex=WORDS), "n": 2}),
}
"""By name: the length of the prompt, and what is asked for."""
MODELS = KINDS | {"decays by channel, and latents": OTHERS["kimi-linear"]}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Iterator[Tokenizer]:
    found = Tokenizer(load_bundle(smollm2_path))
    yield found
    found.close()


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: Any) -> Path:
    made: Path = tmp_path_factory.mktemp("hybrid")
    write_hybrid(*MODELS[request.param], made, tokenizer.vocab_size)
    return made


@pytest.fixture(scope="module")
def runner(folder: Path, runner_loader: Callable[..., Any]) -> Any:
    return runner_loader(folder, deterministic=True)


def requests() -> list[GenerateRequest]:
    return requests_of(REQUESTS, max_tokens=20)


def serve(
    runner: Any, tokenizer: Tokenizer, num_blocks: int = 512, rounds: int = 1, change: Change | None = None, **more: Any
) -> tuple[Answers, int]:
    """Return what each choice got in the last round, and how many requests were preempted or found cached tokens."""
    runner._rows.release(list(runner._rows._row_of))
    info = runner.info
    runner.info = with_blocks(info, num_blocks)._replace(step=None)
    config = EngineConfig(model="m", block_size=info.block_size, eos_token_ids=tokenizer.eos_token_ids, **more)
    try:
        core = EngineCore(config, runner)
        core.grammar_requests.load_tokenizer = lambda: tokenizer
        for _ in range(rounds):
            answers, num_special = _round(core, change or (lambda request: request))
    finally:
        runner.info = info
    return answers, num_special


def _round(core: EngineCore, change: Change) -> tuple[Answers, int]:
    for request in requests():
        core.add(change(request))
    answers: Answers = {}
    special = set()
    while core.has_work:
        for output in core.step().outputs:
            take(answers, output)
            if output.num_preemptions or output.num_cached_tokens:
                special.add((output.request_id, output.choice))
        core.check_integrity()
    return answers, len(special)


def test_answers_have_the_same_bits_however_they_are_computed(runner: Any, tokenizer: Tokenizer) -> None:
    whole, _ = serve(runner, tokenizer, enable_prefix_caching=False)
    assert not [answer for answer in whole.values() if answer["error"]]
    jsonschema.validate(json.loads(tokenizer.decode(whole["form", 0]["token_ids"])), PLACE)
    for choice in range(2):
        assert re.fullmatch(WORDS, tokenizer.decode(whole["words", choice]["token_ids"]))
    assert len({tuple(whole["drawn", choice]["token_ids"]) for choice in range(3)}) > 1
    chunked, _ = serve(runner, tokenizer, enable_prefix_caching=False, max_num_batched_tokens=9, max_num_seqs=4)
    assert chunked == whole
    preempted, num_preempted = serve(runner, tokenizer, num_blocks=9, enable_prefix_caching=False)
    assert preempted == whole
    assert num_preempted
    cached, num_cached = serve(runner, tokenizer, rounds=2)
    assert cached == whole
    assert num_cached >= 3

    def moved(request: GenerateRequest) -> GenerateRequest:
        own = [answer["token_ids"][:7] for (name, _), answer in whole.items() if name == request.request_id]
        resume = [ChoiceResume(choice, tokens, 0) for choice, tokens in enumerate(own)]
        return msgspec.structs.replace(request, resume=resume)

    found, _ = serve(runner, tokenizer, change=moved)
    for key, answer in whole.items():
        assert found[key]["token_ids"] == answer["token_ids"][7:]
        assert found[key]["logprobs"] == answer["logprobs"][7:]


@pytest.mark.parametrize("folder", ["short convolution"], indirect=True)
def test_without_the_setting_bits_depend_on_the_chunks(
    folder: Path, tokenizer: Tokenizer, runner_loader: Callable[..., Any]
) -> None:
    runner = runner_loader(folder)
    whole, _ = serve(runner, tokenizer, enable_prefix_caching=False)
    assert serve(runner, tokenizer, enable_prefix_caching=False, max_num_batched_tokens=9)[0] != whole
