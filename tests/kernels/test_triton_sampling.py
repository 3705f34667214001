"""Triton's sampler gives the reference's tokens for any filters, penalties, ties and batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE, HAS_GPU, close

from pagemill_kernels.sampling import arithmetic, randomness, reference, triton_body
from pagemill_kernels.sampling import triton_launch as sampling
from pagemill_kernels.sampling.batch import Draws, Edits, Penalties, Reports, SampledTokens, SamplingBatch, TokenMasks
from pagemill_kernels.sampling.filters import DRAWS
from pagemill_kernels.sampling.penalties import PENALTIES, apply_penalties


def logits_of(num_rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def draws_of(num_rows: int, position: int = 0, **values: Any) -> Draws:
    """Return parameters in which row i has seed i; each value is one number for all rows, or one for each row."""
    zeros = np.zeros(num_rows, dtype=np.int64)
    keys = randomness.keys(np.arange(num_rows, dtype=np.uint64), zeros, zeros + position)
    return Draws(DRAWS.filled(num_rows, values), keys)


def on_device(batch: SamplingBatch) -> SamplingBatch:
    """Return the batch with tables on the device."""
    if batch.penalties is None:
        return batch
    tables = {name: getattr(batch.penalties, name).to(DEVICE, copy=True) for name in ("in_prompt", "in_output")}
    return batch._replace(penalties=batch.penalties._replace(**tables))


def both(logits: torch.Tensor, batch: SamplingBatch) -> tuple[SampledTokens, SampledTokens]:
    """Return the tokens of the kernels and of the reference."""
    ours = sampling.sample_tokens(logits.to(DEVICE), on_device(batch))
    return ours, reference.sample_tokens(logits.numpy().copy(), on_host(batch))


def on_host(batch: SamplingBatch) -> SamplingBatch:
    """Return the batch with the same tables as arrays."""
    if batch.penalties is None:
        return batch
    tables = {name: getattr(batch.penalties, name).numpy() for name in ("in_prompt", "in_output")}
    return batch._replace(penalties=batch.penalties._replace(**tables))


def check(logits: torch.Tensor, batch: SamplingBatch) -> None:
    ours, theirs = both(logits, batch)
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.finite.tolist() == theirs.finite.tolist()


def set_sizes(monkeypatch: pytest.MonkeyPatch, block: int, capacity: int) -> None:
    for name in ("BLOCK", "CUT_BLOCK", "UP_TO_CUT_BLOCK", "PIECE_BLOCK"):
        monkeypatch.setattr(sampling, name, block)
    monkeypatch.setattr(sampling, "CAPACITY", capacity)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, 64, 16)


FILTERS = {
    "top_k": st.sampled_from([1, 2, 7, 30, 1 << 30]),
    "top_p": st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]),
    "min_p": st.sampled_from([0.0, 1e-4, 0.2, 1.0]),
}


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.integers(1, 100),
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 2.0]),
    spread=st.sampled_from([0.0, 0.01, 3.0, 40.0]),
    rounded=st.booleans(),
    capacity=st.sampled_from([1, 8, 32, 128]),
    **FILTERS,
)
def test_tokens_equal_the_references(
    seed: int, vocab_size: int, spread: float, rounded: bool, capacity: int, **values: float
) -> None:
    """Rounded logits have many ties, at the cut and elsewhere; the small list is full before the cut is found."""
    logits = logits_of(2, vocab_size, seed, spread)
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, 64, capacity)
        check(logits.round() if rounded else logits, SamplingBatch(draws_of(2, seed, **values)))


@triton.jit
def noise_and_bound(noise_ptr, bound_ptr, low, high, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(noise_ptr + token, triton_body.gumbel(low.to(tl.uint32), high.to(tl.uint32), token))
    tl.store(bound_ptr + token, triton_body.most_noise(low.to(tl.uint32), high.to(tl.uint32), token))


def test_no_noise_exceeds_its_bound_and_few_values_are_far_below() -> None:
    noise, bound = (torch.empty(1 << 20, device=DEVICE) for _ in range(2))
    noise_and_bound[(16,)](noise, bound, 7, 11, 1 << 16, enable_fp_fusion=False)
    assert (noise <= bound).all()
    assert (bound - noise)[noise > 2.0].max() < 0.8


@pytest.mark.parametrize(("spread", "ties"), [(3.0, False), (0.05, False), (2.0, True)], ids=["peaked", "flat", "ties"])
def test_a_realistic_vocabulary_gives_the_references_tokens(
    spread: float, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_GPU:  # one tile, because the interpreter's time depends on the number of calls
        set_sizes(monkeypatch, 1 << 16, 1 << 12)
    logits = logits_of(4, 49_153, spread=spread)
    values = {"top_k": [1 << 30, 50, 3000, 1 << 30], "top_p": [0.95, 1.0, 0.8, 1.0], "temperature": [0.7, 1, 1.5, 1]}
    check((logits * 8).round() / 8 if ties else logits, SamplingBatch(draws_of(4, **values)))


def test_rows_do_not_depend_on_their_batch(small_tiles: None) -> None:
    values = {"top_p": [0.9, 1.0, 0.5, 0.9, 1.0], "top_k": [5, 9, 1 << 30, 3, 1 << 30], "temperature": 1.3}
    logits, draws = logits_of(5, 97).to(DEVICE), draws_of(5, **values)
    together = sampling.sample_tokens(logits, SamplingBatch(draws)).token_ids.tolist()
    rows = [np.array([row]) for row in range(5)]
    alone = [sampling.sample_tokens(logits[row], SamplingBatch(draws.at(row))).token_ids[0] for row in rows]
    assert together == alone


def penalties_of(num_rows: int, vocab_size: int, seed: int, **values: float) -> Penalties:
    """Return penalties of every second row; the tables are in reverse order."""
    generator = torch.Generator().manual_seed(seed)
    rows = np.arange(0, num_rows, 2)
    return Penalties(
        rows=rows,
        settings=PENALTIES.filled(len(rows), {f"{name}_penalty": value for name, value in values.items()}),
        count_rows=len(rows) - np.arange(len(rows)),
        in_prompt=torch.rand(len(rows) + 1, vocab_size, generator=generator) < 0.3,
        in_output=torch.randint(0, 3, (len(rows) + 1, vocab_size), generator=generator, dtype=torch.int32),
    )


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    repetition=st.sampled_from([1.0, 0.5, 1.8]),
    frequency=st.sampled_from([0.0, 0.7, -2.0]),
    presence=st.sampled_from([0.0, -1.0, 1.5]),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_edits_and_penalties_change_logits_like_the_reference(seed: int, temperature: float, **values: float) -> None:
    logits = logits_of(5, 83, seed)
    edits = Edits(np.array([0, 0, 3]), np.array([5, 82, 0]), np.array([4.0, -np.inf, -30.0], dtype=np.float32))
    batch = SamplingBatch(draws_of(5, temperature=temperature), edits, penalties_of(5, 83, seed, **values))
    changed = logits.to(DEVICE, copy=True)
    penalties = on_device(batch).penalties
    assert penalties is not None
    assert batch.penalties is not None
    sampling.add_edits(changed, edits)
    sampling.apply_penalties(changed, penalties)
    expected = logits.numpy().copy()
    reference.add_edits(expected, edits)
    theirs = on_host(batch).penalties
    assert theirs is not None
    apply_penalties(expected, theirs)
    assert np.array_equal(changed.cpu().numpy(), expected)
    check(logits, batch)


@pytest.mark.sample("64", "70")
@pytest.mark.parametrize("vocab_size", [70, 64, 1000])
def test_masks_are_applied_before_all_other_changes(small_tiles: None, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    bits = rng.integers(-(2**31), 2**31, (2, -(-vocab_size // 32))).astype(np.int32)
    bits[1] &= rng.integers(-(2**31), 2**31, bits.shape[1]).astype(np.int32)
    masks = TokenMasks(np.array([0, 3]), bits)
    edits = Edits(np.array([3]), np.array([5]), np.array([50.0], dtype=np.float32))
    penalties = penalties_of(4, vocab_size, 0, repetition=1.5, frequency=0.5, presence=0.5)
    logits = logits_of(4, vocab_size)
    check(logits, SamplingBatch(masks=masks))
    check(logits, SamplingBatch(draws_of(4), edits, penalties, masks=masks))
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    for position in range(20):
        ours, _ = both(logits, SamplingBatch(draws_of(4, position), masks=masks))
        assert allowed[0, ours.token_ids[0]]
        assert allowed[1, ours.token_ids[3]]


def test_sampled_tokens_are_counted_for_penalties() -> None:
    penalties = penalties_of(5, 83, 1, frequency=0.5)
    before = penalties.in_output.clone()
    table = on_device(SamplingBatch(penalties=penalties)).penalties
    assert table is not None
    found = sampling.sample_tokens(logits_of(5, 83).to(DEVICE), SamplingBatch(penalties=table))
    more = table.in_output.cpu() - before
    assert more.sum() == 3
    assert more[torch.from_numpy(penalties.count_rows), torch.from_numpy(found.token_ids[penalties.rows])].all()


PROPOSED = [[], [7, 7, 82, 7], [0, 5], [64, 3, 64]]
"""Proposed tokens by request. The one with index 2 has no penalties."""


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    repetition=st.sampled_from([1.0, 0.5, 1.8]),
    frequency=st.sampled_from([0.0, 0.7, -2.0]),
    presence=st.sampled_from([0.0, -1.0, 1.5]),
)
def test_rows_behind_proposed_tokens_are_penalised_and_counted_as_one_by_one(seed: int, **values: float) -> None:
    owners = np.repeat(np.arange(4), [1 + len(each) for each in PROPOSED])
    rows, tables = np.flatnonzero(owners != 2), penalties_of(7, 83, seed)
    penalties = tables._replace(
        rows=rows,
        settings=PENALTIES.filled(len(rows), {f"{name}_penalty": value for name, value in values.items()}),
        count_rows=owners[rows],
        proposed=np.concatenate([[-1, *each] for each in PROPOSED])[rows],
    )
    logits, sampled = logits_of(len(owners), 83, seed), np.random.default_rng(seed).integers(0, 83, len(owners))
    expected, counts, row = logits.numpy().copy(), tables.in_output.numpy().copy(), 0
    for owner, proposed in enumerate(PROPOSED):
        known, right = counts.copy(), np.random.default_rng(seed + owner).integers(0, len(proposed) + 1)
        sampled[row : row + right] = proposed[:right]
        for place in range(len(proposed) + 1):
            if owner != 2:
                before, own = tables._replace(in_prompt=tables.in_prompt.numpy(), in_output=known), np.array([row])
                one = before._replace(rows=own, settings=penalties.settings[:1], count_rows=np.array([owner]))
                apply_penalties(expected, one)
                counts[owner, sampled[row]] += place == 0 or sampled[row - place : row].tolist() == proposed[:place]
            known[owner, proposed[place : place + 1]] += 1
            row += 1
    ours = on_device(SamplingBatch(penalties=penalties)).penalties
    assert ours is not None
    changed = logits.to(DEVICE, copy=True)
    sampling.apply_penalties(changed, ours)
    assert np.array_equal(changed.cpu().numpy(), expected)
    sampling.count(ours, torch.from_numpy(sampled).to(DEVICE))
    assert np.array_equal(ours.in_output.cpu().numpy(), counts)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("changed", [False, True])
def test_a_broken_row_is_reported_and_the_others_continue(bad: float, changed: bool) -> None:
    logits = logits_of(3, 70)
    clean = sampling.sample_tokens(logits.to(DEVICE), SamplingBatch(draws_of(3, top_p=0.9))).token_ids
    logits[1, 7] = bad
    edits = Edits(np.array([1]), np.array([7]), np.array([-np.inf], dtype=np.float32)) if changed else None
    with np.errstate(invalid="ignore"):
        found = sampling.sample_tokens(logits.to(DEVICE), SamplingBatch(draws_of(3, top_p=0.9), edits))
    assert found.finite.tolist() == [True, False, True]
    assert found.token_ids[[0, 2]].tolist() == clean[[0, 2]].tolist()


def test_log_probabilities_are_those_of_the_unchanged_logits(small_tiles: None) -> None:
    logits = logits_of(4, 100)
    edits = Edits(np.array([1]), np.array([int(logits[1].argmin())]), np.array([99.0], dtype=np.float32))
    reports = Reports(np.array([1, 3]), np.array([0, 5]))
    ours, theirs = both(logits, SamplingBatch(draws_of(4), edits, reports=reports))
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    assert ours.logprobs.ranks.tolist() == theirs.logprobs.ranks.tolist()
    assert ours.logprobs.ranks[0] == 100
    assert ours.logprobs.top_ids[1].tolist() == theirs.logprobs.top_ids[1].tolist()
    close(torch.from_numpy(ours.logprobs.chosen), torch.from_numpy(theirs.logprobs.chosen))
    close(torch.from_numpy(ours.logprobs.top[1]), torch.from_numpy(theirs.logprobs.top[1]))


def test_equal_logits_are_reported_in_order_of_their_token_ids() -> None:
    reports = Reports(np.array([0]), np.array([4]))
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]]).to(DEVICE)
    found = sampling.sample_tokens(logits, SamplingBatch(reports=reports)).logprobs
    assert found is not None
    assert found.top_ids.tolist() == [[1, 3, 2, 4]]


def test_the_arithmetic_is_close_to_exact_arithmetic() -> None:
    y = np.concatenate([np.float32(2.0) ** np.arange(-33, 5), np.linspace(0.01, 20, 5000)]).astype(np.float32)
    np.testing.assert_allclose(arithmetic.log(y), np.log(y.astype(np.float64)), rtol=3e-7, atol=1e-7)
    x = np.linspace(-25.9, 0, 5000, dtype=np.float32)
    np.testing.assert_allclose(arithmetic.mass(x) / 2.0**40, np.exp(x.astype(np.float64)), rtol=2e-6, atol=2e-12)
    assert arithmetic.mass(np.array([-26.0, -np.inf], dtype=np.float32)).tolist() == [0, 0]
    last = np.nextafter(np.float32(arithmetic.REACH), np.float32(0)).view(np.int32)
    assert int(last) == triton_body.LAST_KEY.value


def test_logits_that_cannot_be_sampled_are_reported() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        sampling.sample_tokens(torch.zeros(2, 8, dtype=torch.bfloat16, device=DEVICE), SamplingBatch())
    with pytest.raises(ValueError, match="contiguous"):
        sampling.sample_tokens(torch.zeros(8, 2, device=DEVICE).t(), SamplingBatch())
    logits, tokens = torch.zeros(2, 8, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"raw_logits is \[2, 9\]"):
        sampling.draw(logits, torch.zeros(2, 9, device=DEVICE), None)
    with pytest.raises(ValueError, match="settings are"):
        sampling.draw_packed(logits, logits, torch.zeros(11, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match=r"tokens is torch\.int32"):
        sampling.report(logits, tokens.int(), Reports(np.array([0]), np.array([1])))
    with pytest.raises(ValueError, match=r"tokens is \[1\], \[2\] is needed"):
        sampling.report(logits, tokens[:1], Reports(np.array([0]), np.array([1])))
    table = on_device(SamplingBatch(penalties=penalties_of(2, 9, 0))).penalties
    assert table is not None
    with pytest.raises(ValueError, match=r"in_prompt is \[2, 9\], \[2, 8\] is needed"):
        sampling.apply_penalties(logits, table)
    with pytest.raises(ValueError, match=r"in_output is torch\.int64"):
        sampling.apply_penalties(torch.zeros(2, 9, device=DEVICE), table._replace(in_output=table.in_output.long()))


@pytest.mark.gpu
def test_a_batch_of_realistic_size_gives_the_references_tokens() -> None:
    num_rows = 256
    logits = logits_of(num_rows, 151_936)
    values = {"top_p": [0.9, 1.0] * 128, "top_k": [1 << 30, 50, 1 << 30, 5000] * 64, "temperature": 0.8}
    check(logits, SamplingBatch(draws_of(num_rows, **values)))
