"""Beam search equals Hugging Face's `generate(num_beams=k)` in float32: equal sequences in equal order.

The tiny models have few tokens, so that beams complete early and change places often; several of those tokens end a
sequence. The results must also be equal when rows are preempted, computed in chunks, or share steps with other
requests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from pagemill_protocol.request.sampling import SamplingParams

VOCAB_SIZE = 64
EOS = [50, 20]
MAX_TOKENS = 24
DRAW = torch.Generator().manual_seed(11)
PROMPTS: list[list[int]] = [torch.randint(20, VOCAB_SIZE, (length,), generator=DRAW).tolist() for length in (1, 16, 31)]
_expected: dict[str, list[list[int]]] = {}


class Tiny(NamedTuple):
    reference: Any
    driver: Any

    def search(
        self, prompts: list[list[int]], params: list[SamplingParams], eos: list[int], **settings: Any
    ) -> list[list[Any]]:
        """Return all answers to each prompt, best first."""
        answers = self.driver.choices(prompts, params, eos_token_ids=eos, **settings)
        assert all(answer.error is None for found in answers for answer in found)
        return list(answers)

    def expected(self, prompt: list[int], width: int, eos: list[int], **settings: Any) -> list[list[int]]:
        """Return the result of `reference`, which is computed once for all backends, since their weights are equal."""
        key = repr((prompt, width, eos, sorted(settings.items())))
        if key not in _expected:
            _expected[key] = reference(self.reference, prompt, width, eos, **settings)
        return _expected[key]


@pytest.fixture(scope="module")
def tiny(
    tmp_path_factory: pytest.TempPathFactory,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
    backend: str,
) -> Tiny:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        dtype="float32",
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).eval()
    folder: Path = tmp_path_factory.mktemp("tiny-beams")
    model.save_pretrained(folder)
    return Tiny(model, make_driver(runner_loader(folder, backend=backend, num_kv_blocks=256)))


def tokens_of(found: list[Any]) -> list[list[int]]:
    return [answer.token_ids for answer in found]


def reference(model: Any, prompt: list[int], width: int, eos: list[int], **settings: Any) -> list[list[int]]:
    """Return outputs of transformers, truncated after the token that completed them."""
    settings = {"max_new_tokens": MAX_TOKENS, **settings}
    with torch.no_grad():
        sequences = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            eos_token_id=eos or None,
            pad_token_id=0,
            **settings,
        )
    outputs = sequences[:, len(prompt) :].tolist()
    ends = [next((at + 1 for at, token in enumerate(output) if token in eos), len(output)) for output in outputs]
    return [output[:end] for output, end in zip(outputs, ends, strict=True)]


def beams(width: int, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"n": width, "use_beam_search": True, "max_tokens": MAX_TOKENS, "logprobs": 0, **settings})


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
def test_sequences_and_their_order_equal_transformers(
    tiny: Tiny, early_stopping: bool | str, length_penalty: float
) -> None:
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    answers = tiny.search(PROMPTS, [beams(4, **settings)] * len(PROMPTS), EOS)
    for prompt, found in zip(PROMPTS, answers, strict=True):
        assert tokens_of(found) == tiny.expected(prompt, 4, EOS, **settings)
    assert {answer.finish_reason for found in answers for answer in found} >= {"stop"}


@pytest.mark.parametrize("eos", [[], EOS[:1]], ids=["no end", "one end"])
@pytest.mark.parametrize("width", [1, 2, 8])
def test_any_width_and_end_condition_equals_transformers(tiny: Tiny, width: int, eos: list[int]) -> None:
    (found,) = tiny.search([PROMPTS[1]], [beams(width)], eos)
    assert tokens_of(found) == tiny.expected(PROMPTS[1], width, eos)


def test_with_n_below_the_width_the_best_answers_are_returned(tiny: Tiny) -> None:
    (found,) = tiny.search([PROMPTS[2]], [beams(4, n=2, best_of=4)], EOS)
    assert tokens_of(found) == tiny.expected(PROMPTS[2], 4, EOS, length_penalty=1.0, early_stopping=False)[:2]


def test_no_answer_ends_before_min_tokens(tiny: Tiny) -> None:
    (found,) = tiny.search([PROMPTS[0]], [beams(4, min_tokens=15)], EOS)
    assert tokens_of(found) == tiny.expected(PROMPTS[0], 4, EOS, min_new_tokens=15)
    assert min(len(each.token_ids) for each in found) > 15


def test_log_probabilities_are_those_of_the_model(tiny: Tiny) -> None:
    (found,) = tiny.search([PROMPTS[2]], [beams(4)], EOS)
    for answer in found:
        with torch.no_grad():
            logits = tiny.reference(torch.tensor([PROMPTS[2] + answer.token_ids])).logits[0]
        rows = logits[len(PROMPTS[2]) - 1 : -1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(answer.token_ids)[:, None]).sum()
        assert sum(answer.logprobs) == pytest.approx(float(expected), abs=1e-3)
    scores = [sum(answer.logprobs) / len(answer.token_ids) for answer in found]
    assert scores == sorted(scores, reverse=True)


CASES: dict[str, dict[str, Any]] = {
    "fewer rows than beams": {"max_num_seqs": 3},
    "steps of few tokens": {"max_num_batched_tokens": 5},
    "little memory": {"num_blocks": 14, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("case", CASES)
def test_answers_do_not_depend_on_concurrent_requests(tiny: Tiny, case: str) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = [PROMPTS[1], *PROMPTS, PROMPTS[2]]
    answers = tiny.search(prompts, [greedy, *[beams(4)] * len(PROMPTS), greedy], EOS, **CASES[case])
    for prompt, found in zip(PROMPTS, answers[1:-1], strict=True):
        assert tokens_of(found) == tiny.expected(prompt, 4, EOS, length_penalty=1.0, early_stopping=False)
