"""The native sampler gives the reference's tokens for any filters, edits, penalties, masks and ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from examples import num_examples
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.sampling import native, randomness, reference
from pagemill_kernels.sampling.batch import (
    Draws,
    Edits,
    NamedTokens,
    Penalties,
    Reports,
    SampledTokens,
    SamplingBatch,
    TokenMasks,
)
from pagemill_kernels.sampling.filters import DRAWS
from pagemill_kernels.sampling.penalties import PENALTIES

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
Floats = NDArray[np.float32]


def referred(logits: Floats, batch: SamplingBatch) -> SampledTokens:
    return reference.sample_tokens(logits.copy(), batch)


def with_own_counts(batch: SamplingBatch) -> SamplingBatch:
    if batch.penalties is None:
        return batch
    return batch._replace(penalties=batch.penalties._replace(in_output=batch.penalties.in_output.copy()))


def check(logits: Floats, batch: SamplingBatch) -> None:
    given_logits, own = logits.copy(), with_own_counts(batch)
    ours, theirs = native.sample_tokens(given_logits, own), referred(logits, batch)
    assert ours.finite.tolist() == theirs.finite.tolist()
    whole = theirs.finite
    assert ours.token_ids[whole].tolist() == theirs.token_ids[whole].tolist()
    if own.penalties is not None and batch.penalties is not None and whole.all():
        assert np.array_equal(own.penalties.in_output, batch.penalties.in_output)
    if batch.reports is not None and ours.logprobs is not None and theirs.logprobs is not None:
        check_reports(logits, batch.reports, ours, theirs)


def check_reports(logits: Floats, reports: Reports, ours: SampledTokens, theirs: SampledTokens) -> None:
    mine, wanted = ours.logprobs, theirs.logprobs
    assert mine is not None
    assert wanted is not None
    for place, (row, width) in enumerate(zip(reports.rows.tolist(), reports.widths.tolist(), strict=True)):
        if not theirs.finite[row]:
            continue
        assert mine.ranks[place] == wanted.ranks[place]
        close(mine.chosen[place], wanted.chosen[place])
        close(mine.top[place, :width], wanted.top[place, :width])
        ids = mine.top_ids[place, :width]
        assert ids.tolist() == wanted.top_ids[place, :width].tolist()


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Floats, SamplingBatch]:
    """Draw any logits, with ties, and the sampling parameters of some of their rows."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_rows, vocab_size = draw(st.integers(1, 6)), draw(st.sampled_from([2, 33, 500, 1500, 9000]))
    logits = random.normal(0, draw(st.sampled_from([0.01, 1.0, 5.0, 30.0])), (num_rows, vocab_size)).astype(np.float32)
    if draw(st.booleans()):
        logits = (np.round(logits * 2) / 2).astype(np.float32)
    if draw(st.integers(0, 5)) == 0:
        logits[random.integers(num_rows), random.integers(vocab_size)] = draw(st.sampled_from([np.nan, np.inf]))
    asked = {name: draw(st.booleans()) for name in ("draws", "masks", "edits", "penalties", "reports")}
    makers = {"draws": draws_of, "masks": masks_of, "edits": edits_of, "penalties": penalties_of, "reports": reports_of}
    parts: dict[str, Any] = {name: make(random, num_rows, vocab_size) for name, make in makers.items() if asked[name]}
    return logits, SamplingBatch(**parts)


DRAW_VALUES: dict[str, list[float]] = {
    "temperature": [0.0, 0.3, 1.0, 1.7, 50.0],
    "top_k": [1, 2, 7, 50, 1024, 1100, 1 << 30],
    "top_p": [1e-9, 0.3, 0.9, 0.999, 1.0],
    "min_p": [0.0, 0.0, 0.001, 0.1, 1.0],
}
PENALTY_VALUES: dict[str, list[float]] = {
    "repetition_penalty": [1.0, 1.1, 0.7],
    "frequency_penalty": [0.0, 0.3, -1.1],
    "presence_penalty": [0.0, 0.7],
}


def draws_of(random: np.random.Generator, num_rows: int, vocab_size: int) -> Draws:
    zeros = np.zeros(num_rows, dtype=np.int64)
    values = {name: random.choice(DRAW_VALUES[name], num_rows) for name in DRAWS}
    keys = randomness.keys(random.integers(0, 2**63, num_rows).astype(np.uint64), zeros, zeros + 3)
    return Draws(DRAWS.filled(num_rows, values), keys)


def some_rows(random: np.random.Generator, num_rows: int) -> NDArray[np.int64]:
    return np.sort(random.permutation(num_rows)[: random.integers(1, num_rows + 1)])


def masks_of(random: np.random.Generator, num_rows: int, vocab_size: int) -> TokenMasks:
    rows = some_rows(random, num_rows)
    bits = random.integers(-(2**31), 2**31, (len(rows), -(-vocab_size // 32))).astype(np.int32)
    bits[:, 0] |= 1
    return TokenMasks(rows, bits)


def edits_of(random: np.random.Generator, num_rows: int, vocab_size: int) -> Edits:
    pairs = {(int(random.integers(num_rows)), int(random.integers(1, vocab_size))) for _ in range(5)}
    rows, token_ids = np.array(sorted(pairs, key=lambda pair: pair[1])).T
    return Edits(rows, token_ids, random.choice([-np.inf, -3.5, 0.1, 100.0], len(rows)).astype(np.float32))


def penalties_of(random: np.random.Generator, num_rows: int, vocab_size: int) -> Penalties:
    rows = some_rows(random, num_rows)
    return Penalties(
        rows,
        PENALTIES.filled(len(rows), {name: random.choice(PENALTY_VALUES[name], len(rows)) for name in PENALTIES}),
        random.permutation(num_rows + 2)[: len(rows)],
        random.random((num_rows + 2, vocab_size)) < 0.2,
        random.integers(0, 3, (num_rows + 2, vocab_size)).astype(np.int32),
    )


def reports_of(random: np.random.Generator, num_rows: int, vocab_size: int) -> Reports:
    rows = some_rows(random, num_rows)
    num_top = random.integers(0, min(20, vocab_size) + 1, len(rows))
    if random.random() < 0.5:
        return Reports(rows, num_top)
    num_top[0] = 0
    wanted = random.integers(0, vocab_size, 4)
    return Reports(rows, num_top, NamedTokens(np.zeros(4, dtype=np.int64), np.arange(4), wanted))


@settings(max_examples=num_examples(400), deadline=None)
@given(batches())
def test_tokens_equal_the_references(batch: tuple[Floats, SamplingBatch]) -> None:
    check(*batch)


def test_a_large_nearly_uniform_vocabulary_is_cut_like_in_the_reference() -> None:
    """The cut by probability mass lies beyond the shortlist, and most tokens may win."""
    random = np.random.default_rng(1)
    logits = random.normal(0, 0.05, (3, 40_000)).astype(np.float32)
    settings = DRAWS.filled(3, {"top_p": [0.4, 0.97, 1.0], "top_k": [0, 0, 20_000]})
    for position in range(8):
        keys = randomness.keys(np.arange(3, dtype=np.uint64), np.zeros(3, dtype=np.int64), np.full(3, position))
        check(logits, SamplingBatch(Draws(settings, keys)))


def test_the_number_of_threads_changes_no_token() -> None:
    random = np.random.default_rng(2)
    logits = random.normal(0, 2, (64, 4000)).astype(np.float32)
    batch = SamplingBatch(draws_of(random, 64, 4000), reports=Reports(np.arange(64), np.full(64, 5)))
    expected = native.sample_tokens(logits, batch)
    launch.set_num_threads(2)
    try:
        found = native.sample_tokens(logits, batch)
    finally:
        launch.set_num_threads(1)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs is not None
    assert expected.logprobs is not None
    assert np.array_equal(found.logprobs.top, expected.logprobs.top)


def test_best_tokens_of_many_rows_equal_the_references() -> None:
    logits = np.round(np.random.default_rng(4).normal(0, 3, (40, 30_000))).astype(np.float32)
    logits[3, 7], logits[5, 29_999], logits[6] = np.nan, np.inf, -np.inf
    assert logits.size > native.NATIVE_ELEMENTS
    check(logits, SamplingBatch())


def test_reports_of_given_tokens_equal_the_references() -> None:
    random = np.random.default_rng(5)
    logits = random.normal(0, 3, (6, 1234)).astype(np.float32)
    tokens, reports = random.integers(0, 1234, 6), reports_of(random, 6, 1234)
    theirs = reference.report(logits[reports.rows], tokens, reports)
    ours = native.report(logits[reports.rows], tokens, reports)
    assert np.array_equal(ours.ranks, theirs.ranks)
    for row, width in enumerate(reports.widths.tolist()):
        assert np.array_equal(ours.top_ids[row, :width], theirs.top_ids[row, :width])
        close(ours.top[row, :width], theirs.top[row, :width])
    close(ours.chosen, theirs.chosen)


def test_logits_are_not_changed() -> None:
    random = np.random.default_rng(3)
    logits = random.normal(0, 2, (4, 700)).astype(np.float32)
    kept = logits.copy()
    native.sample_tokens(logits, SamplingBatch(draws_of(random, 4, 700), edits_of(random, 4, 700)))
    assert np.array_equal(logits, kept)
