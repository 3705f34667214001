"""Ranks of several nodes sample from logits that they divide: tokens and reports of whole rows, from fewer bytes."""

from __future__ import annotations

from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tcp_ranks import tcp_groups

from examples import num_examples
from pagemill_execution.runners.ranks.divided_logits import DividedLogits
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.step import AdmittedSequence
from pagemill_kernels.arrays import Array
from pagemill_kernels.cpu import library
from pagemill_kernels.sampling import native, reference
from pagemill_kernels.sampling.batch import Logprobs, Reports, SampledTokens, SamplingBatch, TokenMasks
from pagemill_models.sharding.slices import dealt
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")

DECIDED: dict[str, dict[str, Any]] = {
    "the best token": {"temperature": 0.0},
    "any token": {},
    "any token, hot": {"temperature": 4.0},
    "min_p": {"min_p": 0.2},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1, "temperature": 1.7},
    "top_p": {"top_p": 0.6, "temperature": 0.3},
    "top_p, little": {"top_p": 1e-6},
    "top_k and top_p": {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    "top_k and all of the mass": {"top_k": 1000, "top_p": 0.999, "temperature": 2.0},
    "a bias": {"logit_bias": {3: 2.5, 290: -1.0}},
    "a bias of the best": {"logit_bias": {290: 30.0}, "temperature": 0.0},
    "bad words and min_tokens": {"logit_bias": {290: -100.0}, "min_tokens": 9, "stop_token_ids": [5, 7]},
    "a penalty": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "temperature": 0.9, "top_k": 50},
    "a penalty, the best": {"frequency_penalty": -0.7, "temperature": 0.0},
    "log probabilities": {"logprobs": 4, "top_p": 0.5},
    "log probabilities of the best": {"logprobs": 2, "temperature": 0.0},
    "no alternatives": {"logprobs": 0},
    "named tokens": {"logprob_token_ids": [0, 299, 150]},
    "everything": {
        "logprobs": 20,
        "logit_bias": {9: 3.0},
        "repetition_penalty": 0.8,
        "top_p": 0.9,
        "min_p": 0.01,
        "top_k": 60,
    },
}
WHOLE: dict[str, dict[str, Any]] = {
    "more than are sent": {"top_k": 3000, "temperature": 8.0},
    "nearly all of the mass": {"top_p": 0.9999, "temperature": 9.0},
    "penalties, hot": {"repetition_penalty": 1.3, "top_k": 3000, "temperature": 8.0, "logprobs": 3},
}


def admitted(number: int, params: dict[str, Any]) -> AdmittedSequence:
    token_ids = [1, 5, 290, 5]
    sampling = SamplingParams(**{"temperature": 1.0} | params)
    return AdmittedSequence(str(number), token_ids, len(token_ids) - 1, 0, [], sampling, choice=0, seed=7 + number)


def rows_of(cases: list[dict[str, Any]], vocab_size: int) -> SamplingRows:
    rows = SamplingRows(len(cases), vocab_size)
    for number, params in enumerate(cases):
        rows.admit(number, admitted(number, params))
    return rows


def batch_of(cases: list[dict[str, Any]], vocab_size: int, position: int) -> SamplingBatch:
    return rows_of(cases, vocab_size).batch(np.arange(len(cases)), np.full(len(cases), position))


class Divided:
    """Ranks that divide logits, all but the first in threads."""

    def __init__(self, size: int, vocab_size: int) -> None:
        self._groups, self._signals = tcp_groups(size, 60.0, None)
        self._columns = dealt(vocab_size, size)
        self.first, *self._others = [DividedLogits(group, vocab_size) for group in self._groups]

    def run(self, logits: Array, run: Any) -> Any:
        parts = [np.ascontiguousarray(logits[:, first:end]) for first, end in self._columns]
        threads = [Thread(target=each.answer, args=(own,)) for each, own in zip(self._others, parts[1:], strict=True)]
        for thread in threads:
            thread.start()
        found = run(parts[0])
        for thread in threads:
            thread.join()
        return found

    def sample(self, logits: Array, batch: SamplingBatch) -> SampledTokens:
        found: SampledTokens = self.run(logits, lambda own: self.first.sample(own, batch))
        return found

    def close(self) -> None:
        for each in (*self._signals, *self._groups):
            each.close()


@pytest.fixture(params=[(2, 301), (3, 5000)], ids=str)
def divided(request: pytest.FixtureRequest) -> Any:
    size, vocab_size = request.param
    found = Divided(size, vocab_size)
    yield found, vocab_size
    found.close()


def logits_of(rows: int, vocab_size: int, seed: int) -> Array:
    """Return logits of which many are equal."""
    generator = np.random.default_rng(seed)
    return np.round(generator.standard_normal((rows, vocab_size)) * 3, 1).astype(np.float32)


def assert_same(found: SampledTokens, expected: SampledTokens) -> None:
    assert found.finite.tolist() == expected.finite.tolist()
    assert found.token_ids[expected.finite].tolist() == expected.token_ids[expected.finite].tolist()
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None and expected.logprobs is not None:
        for name in Logprobs._fields:
            assert getattr(found.logprobs, name).tolist() == getattr(expected.logprobs, name).tolist(), name


def sampled(logits: Array, batch: SamplingBatch) -> SampledTokens:
    """Return what one rank samples from all logits, which equals the reference but for the last bits of logarithms."""
    expected = reference.sample_tokens(logits.copy(), copied(batch))
    found = native.sample_tokens(logits.copy(), batch)
    assert found.token_ids[expected.finite].tolist() == expected.token_ids[expected.finite].tolist()
    return found


def copied(batch: SamplingBatch) -> SamplingBatch:
    """Return the batch with counts of its own."""
    if batch.penalties is None:
        return batch
    return batch._replace(penalties=batch.penalties._replace(in_output=batch.penalties.in_output.copy()))


def test_tokens_are_those_of_whole_rows(divided: tuple[Divided, int]) -> None:
    ranks, vocab_size = divided
    cases = [*DECIDED.values(), *WHOLE.values()]
    for position in range(6):
        logits = logits_of(len(cases), vocab_size, position)
        logits[:, vocab_size // 2 :] -= 2.0 * (position % 3)  # the likeliest tokens are in one part, or in all
        expected = sampled(logits, batch_of(cases, vocab_size, position))
        assert_same(ranks.sample(logits, batch_of(cases, vocab_size, position)), expected)


@pytest.mark.parametrize("kind", DECIDED)
def test_rows_that_candidates_decide_are_not_gathered(kind: str) -> None:
    """Also where the best tokens are equally likely, and in other parts."""
    vocab_size = 5000
    ranks, cases = Divided(2, vocab_size), [DECIDED[kind]] * 3
    logits = logits_of(3, vocab_size, 5)
    logits[1, [17, 4000]] = logits[1].max() + 3
    logits[2, 4999] = 40.0
    expected = sampled(logits, batch_of(cases, vocab_size, 2))
    assert_same(ranks.sample(logits, batch_of(cases, vocab_size, 2)), expected)
    # Best tokens twice, the draw, candidates, and a report of at most 20 tokens.
    assert ranks.first.num_bytes <= 3 * (2 * 12 + 28 + 8 * 1024 + 20 * 12 + 40)
    assert ranks.first.num_bytes < logits[:, vocab_size // 2 :].nbytes
    ranks.close()


@pytest.mark.parametrize("kind", WHOLE)
def test_rows_that_they_do_not_decide_are_gathered_alone(kind: str) -> None:
    vocab_size = 5000
    ranks, cases = Divided(2, vocab_size), [{"temperature": 0.0}, WHOLE[kind], {"temperature": 0.0}]
    logits = (logits_of(3, vocab_size, 6) / 3).astype(np.float32)
    expected = sampled(logits, batch_of(cases, vocab_size, 2))
    assert_same(ranks.sample(logits, batch_of(cases, vocab_size, 2)), expected)
    row = logits[0, vocab_size // 2 :].nbytes
    assert row <= ranks.first.num_bytes <= row + 3 * (2 * 12 + 28 + 8 * 1024 + 20 * 12 + 40)
    ranks.close()


def test_rows_with_masks_and_rows_that_are_not_finite_concern_no_other_row(divided: tuple[Divided, int]) -> None:
    ranks, vocab_size = divided
    cases = [{}, {"temperature": 0.0}, {"top_p": 0.7}, {}, {"temperature": 0.0}]
    logits = logits_of(5, vocab_size, 9)
    logits[0, -1], logits[3, 2] = np.nan, np.inf
    bits = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    bits[0, 1] = 0b1011
    masks = TokenMasks(np.array([2]), bits)
    expected = sampled(logits, batch_of(cases, vocab_size, 1)._replace(masks=masks))
    found = ranks.sample(logits, batch_of(cases, vocab_size, 1)._replace(masks=masks))
    assert expected.finite.tolist() == [False, True, True, False, True]
    assert_same(found, expected)
    assert 32 <= found.token_ids[2] <= 35


def test_penalties_count_what_rank_0_samples(divided: tuple[Divided, int]) -> None:
    ranks, vocab_size = divided
    cases = [{"frequency_penalty": 1.5, "temperature": 0.0}, {}]
    whole, own = rows_of(cases, vocab_size), rows_of(cases, vocab_size)
    for position in range(5):
        logits, at = logits_of(2, vocab_size, 3), np.full(2, position)
        expected = sampled(logits, whole.batch(np.arange(2), at))
        assert_same(ranks.sample(logits, own.batch(np.arange(2), at)), expected)
    assert own.counts is not None
    assert whole.counts is not None
    assert np.array_equal(own.counts.in_output, whole.counts.in_output)


def test_whole_rows_are_those_of_all_ranks(divided: tuple[Divided, int]) -> None:
    ranks, vocab_size = divided
    logits = logits_of(4, vocab_size, 2)
    assert np.array_equal(ranks.run(logits, ranks.first.whole), logits)


def test_reports_of_prompts_are_those_of_whole_rows(divided: tuple[Divided, int]) -> None:
    ranks, vocab_size = divided
    logits, token_ids = logits_of(5, vocab_size, 4), np.array([0, 7, vocab_size - 1, 150, 151])
    reports = Reports(np.arange(5), np.array([3, 0, 40, 200, 1]))
    expected = native.report(logits.copy(), token_ids, reports)
    found = ranks.run(logits, lambda own: ranks.first.report(own, token_ids, reports))
    for name in Logprobs._fields:
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    assert ranks.first.num_bytes < 5 * (12 + 8 + 200 * 12 + 4 + 8) * len(ranks.first._others) + 1


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 5.0]),
        "top_k": st.sampled_from([1, 5, 200]),
        "top_p": st.sampled_from([0.1, 0.8, 0.9999]),
        "min_p": st.sampled_from([0.01, 0.3]),
        "logit_bias": st.dictionaries(st.integers(0, 300), st.floats(-100, 100, width=16), max_size=4),
        "repetition_penalty": st.sampled_from([0.7, 1.4]),
        "frequency_penalty": st.sampled_from([-0.5, 1.0]),
        "presence_penalty": st.sampled_from([-0.5, 1.0]),
        "logprobs": st.integers(0, 20),
    },
)


@pytest.fixture(scope="module")
def three_ranks() -> Any:
    found = Divided(3, 301)
    yield found
    found.close()


@settings(max_examples=num_examples(100), deadline=None)
@given(
    cases=st.lists(SETTINGS, min_size=1, max_size=6), seed=st.integers(0, 1000), masked=st.sets(st.integers(0, 5)),
    allowed=st.sampled_from([0.002, 0.1, 0.9]), scale=st.sampled_from([0.3, 3.0, 12.0]),
)  # fmt: skip
def test_any_batch_gives_the_bits_of_one_rank(
    three_ranks: Divided, cases: list[dict[str, Any]], seed: int, masked: set[int], allowed: float, scale: float
) -> None:
    generator = np.random.default_rng(seed)
    own, whole = rows_of(cases, 301), rows_of(cases, 301)
    rows = np.array(sorted(row for row in masked if row < len(cases)), dtype=np.int64)
    for position in range(3):
        logits = (logits_of(len(cases), 301, seed + position) * scale).astype(np.float32)
        fits = generator.random((len(rows), 320)) < allowed
        fits[:, generator.integers(301)] = True
        bits = np.packbits(fits, axis=1, bitorder="little").view(np.int32)
        masks = TokenMasks(rows, bits) if len(rows) else None
        at = np.arange(len(cases)), np.full(len(cases), position)
        expected = sampled(logits, whole.batch(*at)._replace(masks=masks))
        assert_same(three_ranks.sample(logits, own.batch(*at)._replace(masks=masks)), expected)
    if own.counts is not None and whole.counts is not None:
        assert np.array_equal(own.counts.in_output, whole.counts.in_output)
