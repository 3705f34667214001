"""The effect of each sampling parameter on a batch equals its plain definition, and rows are independent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.sampling.sampler import Sampled, sample
from pagemill_execution.step import AdmittedSequence
from pagemill_kernels.sampling import filters
from pagemill_kernels.sampling.columns import Columns
from pagemill_kernels.sampling.filters import DRAWS
from pagemill_kernels.sampling.penalties import PENALTIES
from pagemill_protocol.request.sampling import BOUNDS, SamplingParams

VOCAB = 50


def rows_for(
    params: list[SamplingParams],
    prompts: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
    eos: list[int] | None = None,
    vocab_size: int = VOCAB,
) -> SamplingRows:
    rows = SamplingRows(len(params), vocab_size)
    for i, sampling in enumerate(params):
        prompt, output = (prompts[i] if prompts else [1]), (outputs[i] if outputs else [])
        rows.admit(
            i,
            AdmittedSequence(
                request_id=str(i),
                token_ids=prompt + output,
                num_prompt_tokens=len(prompt),
                num_computed_tokens=0,
                tables=[],
                sampling=sampling,
                choice=0,
                seed=sampling.seed or 0,
                eos_token_ids=eos or [],
            ),
        )
    return rows


def run(logits: torch.Tensor, rows: SamplingRows, num_generated: int = 0) -> Sampled:
    count = len(logits)
    return sample(logits.numpy().copy(), rows, np.arange(count), np.full(count, num_generated))


def draw(logits: list[float], params: SamplingParams, num_draws: int = 400, **kinds: Any) -> list[int]:
    """Return the tokens sampled at positions 0, 1, 2... of one request."""
    rows = rows_for([params], vocab_size=len(logits), **kinds)
    batch = np.array([logits] * num_draws, dtype=np.float32)
    result = sample(batch, rows, np.zeros(num_draws, dtype=np.int64), np.arange(num_draws))
    return result.token_ids.tolist()


def logits_of(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("columns", [DRAWS, PENALTIES])
def test_parameters_without_effect_are_the_same_for_requests_and_samplers(columns: Columns) -> None:
    for name in columns:
        assert columns.neutral(name) in BOUNDS[name].neutral


def test_greedy_decoding_takes_the_best_token() -> None:
    logits = logits_of(0, 4)
    result = run(logits, rows_for([SamplingParams(temperature=0)] * 4))
    assert result.token_ids.tolist() == logits.argmax(-1).tolist()
    assert result.finite.all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_reported_and_the_others_continue(bad: float, temperature: float) -> None:
    logits = logits_of(0, 3)
    clean = run(logits, rows_for([SamplingParams(temperature=temperature, seed=1, logprobs=1)] * 3))
    logits[1, 7] = bad
    result = run(logits, rows_for([SamplingParams(temperature=temperature, seed=1, logprobs=1)] * 3))
    assert result.finite.tolist() == [True, False, True]
    assert result.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
    assert sorted(result.logprobs) == [0, 2]


def test_top_k_keeps_the_k_best() -> None:
    drawn = draw([0.0, 1.0, 2.0, 3.0, 2.5], SamplingParams(top_k=2, temperature=2.0))
    assert set(drawn) == {3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(draw(logits, SamplingParams(top_p=0.79))) == {0, 1}
    assert set(draw(logits, SamplingParams(top_p=0.81))) == {0, 1, 2}
    assert set(draw(logits, SamplingParams(top_p=1e-9))) == {0}


def test_top_p_applies_to_the_tokens_that_top_k_keeps() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    # Of the two best, 0.4 is 57 %, which is enough for 0.55; of all four it would not be.
    assert set(draw(logits, SamplingParams(top_p=0.55, top_k=2))) == {0}
    assert set(draw(logits, SamplingParams(top_p=0.55))) == {0, 1}


def test_min_p_is_relative_to_the_best_token() -> None:
    logits = torch.tensor([0.5, 0.26, 0.2, 0.04]).log().tolist()
    assert set(draw(logits, SamplingParams(min_p=0.5))) == {0, 1}


def test_a_tiny_temperature_is_greedy() -> None:
    assert set(draw([0.0, 0.001], SamplingParams(temperature=1e-7))) == {1}
    assert set(draw([0.0, 0.001], SamplingParams(temperature=1e-40))) == {1}


def test_equal_seeds_sample_equal_tokens_and_another_seed_others() -> None:
    logits = [0.0] * VOCAB
    first = draw(logits, SamplingParams(seed=5))
    assert first == draw(logits, SamplingParams(seed=5))
    assert first != draw(logits, SamplingParams(seed=6))
    assert first != draw(logits, SamplingParams(seed=-5))


def test_sampled_tokens_do_not_depend_on_the_batch() -> None:
    params = [SamplingParams(seed=i, temperature=1.5, top_p=0.9 if i % 2 else 1.0) for i in range(20)]
    logits = logits_of(3, 20)
    together = run(logits, rows_for(params), num_generated=4).token_ids.tolist()
    alone = [int(run(logits[i : i + 1], rows_for([params[i]]), 4).token_ids[0]) for i in range(20)]
    assert together == alone


def test_logit_bias_is_added() -> None:
    logits = logits_of(1, 2)
    result = run(
        logits, rows_for([SamplingParams(temperature=0, logit_bias={11: 100.0}), SamplingParams(temperature=0)])
    )
    assert result.token_ids.tolist() == [11, int(logits[1].argmax())]


def test_no_end_of_sequence_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 3, 4]] = torch.tensor([9.0, 8.0, 7.0])
    rows = rows_for([SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[3])], eos=[2])
    assert run(logits, rows, num_generated=2).token_ids.tolist() == [4]
    assert run(logits, rows, num_generated=3).token_ids.tolist() == [2]


def penalised(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Apply penalties by their definition, token by token."""
    result = logits.clone()
    for token in set(prompt + output):
        factor = params.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token in set(output):
        result[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return result


@settings(max_examples=num_examples(60), deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    presence=st.sampled_from([0.0, -1.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.7, -2.0]),
    repetition=st.sampled_from([1.0, 0.5, 1.8]),
    seed=st.integers(0, 1000),
)
def test_penalties_follow_their_definition(
    prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float, seed: int
) -> None:
    params = SamplingParams(
        temperature=0, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    logits = logits_of(seed, 1)
    # Half of the output is counted at admission, the other half during generation.
    half = len(output) // 2
    rows = rows_for([SamplingParams(temperature=0), params], [[1], prompt], [[], output[:half]])
    for token in output[half:]:
        sure = torch.zeros(2, VOCAB)
        sure[0, 5] = sure[1, token] = 1e6
        assert run(sure, rows).token_ids.tolist() == [5, token]
    result = run(logits.repeat(2, 1), rows)
    expected = int(penalised(logits[0], params, prompt, output).argmax())
    assert result.token_ids.tolist() == [int(logits[0].argmax()), expected]


def test_a_reused_row_has_no_state_of_its_last_request() -> None:
    heavy = SamplingParams(temperature=0, presence_penalty=2.0, logit_bias={1: 50.0}, min_tokens=5, stop_token_ids=[0])
    rows = rows_for([heavy], outputs=[[9, 9]])
    light = rows_for([SamplingParams(temperature=0)])
    rows.admit(0, AdmittedSequence("x", [1], 1, 0, [], SamplingParams(temperature=0, presence_penalty=0.1), 0, 0))
    logits = logits_of(4, 1)
    assert run(logits, rows).token_ids.tolist() == run(logits, light).token_ids.tolist()


def test_logprobs_are_those_of_the_model_before_any_parameter() -> None:
    logits = logits_of(2, 2)
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={int(logits[0].argmin()): 100.0})
    result = run(logits, rows_for([params, SamplingParams(temperature=0.7, logprobs=0, seed=1)]))
    reference = logits.log_softmax(-1)
    report = result.logprobs[0]
    token = int(logits[0].argmin())
    top = reference[0].topk(3)
    assert report.token_ids == [token, *top.indices.tolist()]
    assert report.logprobs == pytest.approx([float(reference[0, token]), *top.values.tolist()])
    assert report.rank == VOCAB
    drawn = int(result.token_ids[1])
    assert result.logprobs[1].token_ids == [drawn]
    assert result.logprobs[1].rank == 1 + int((reference[1] > reference[1, drawn]).sum())


@pytest.mark.parametrize("shape", ["peaked", "flat"])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.999), (5, 1.0), (1500, 0.99), (3000, 1.0), (2000, 0.5)])
def test_filters_on_a_large_vocabulary_equal_a_full_sort(shape: str, top_k: int, top_p: float) -> None:
    vocab_size = 4000
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1)) * (4 if shape == "peaked" else 0.1)
    expected = torch.stack([sorted_filter(row, top_k or vocab_size, top_p) for row in logits])
    actual = logits.clone()
    filters.apply(actual.numpy(), filters.DRAWS.filled(3, {"top_k": top_k, "top_p": top_p}))
    differing = (actual.isfinite() != expected.isfinite()).sum(-1)
    # Sums of float32 in another order may move the limit by one token of a flat distribution.
    assert int(differing.max()) <= 2
    kept = actual.isfinite()
    assert torch.equal(actual[kept], logits[kept])


def sorted_filter(row: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    values, order = row.double().sort(descending=True)
    values[top_k:] = float("-inf")
    probabilities = values.softmax(-1)
    if top_p < 1.0:
        values[probabilities.cumsum(-1) - probabilities >= top_p] = float("-inf")
    return torch.full_like(row, float("-inf")).scatter(0, order, values.float())
