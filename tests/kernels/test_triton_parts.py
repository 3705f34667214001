"""Devices that divide a vocabulary sample and report what one device does, bit for bit, and gather no row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import together
from triton_device import DEVICE

from examples import num_examples
from pagemill_kernels.sampling import randomness, triton_launch
from pagemill_kernels.sampling.batch import (
    Draws,
    Edits,
    Logprobs,
    NamedTokens,
    Penalties,
    Reports,
    SamplingBatch,
    TokenMasks,
)
from pagemill_kernels.sampling.device_sample import DeviceSample
from pagemill_kernels.sampling.filters import DRAWS
from pagemill_kernels.sampling.penalties import PENALTIES
from pagemill_kernels.sampling.triton_parts import DividedSampler, Filters
from pagemill_models.sharding.slices import dealt


class Meeting:
    """Where threads exchange. One runs at a time, since the interpreter has no room for two."""

    def __init__(self, size: int) -> None:
        self.barrier, self.turn = threading.Barrier(size), threading.Lock()
        self.given: list[Any] = [None] * size
        self.num_bytes = 0


class Exchange:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size, self._meeting = rank, len(meeting.given), meeting

    def gather_alike(self, buffer: torch.Tensor) -> torch.Tensor:
        meeting = self._meeting
        meeting.given[self.rank] = buffer.clone()
        meeting.num_bytes += buffer.nbytes
        self._wait()
        found = torch.stack(meeting.given)
        self._wait()
        return found

    def add_integers(self, buffer: torch.Tensor) -> None:
        assert not buffer.dtype.is_floating_point
        buffer.copy_(self.gather_alike(buffer).sum(0))

    def broadcast(self, buffer: torch.Tensor, sender: int) -> None:
        buffer.copy_(self.gather_alike(buffer)[sender])

    def _wait(self) -> None:
        self._meeting.turn.release()
        try:
            self._meeting.barrier.wait(60)
        finally:
            self._meeting.turn.acquire()


class Ranks:
    """Devices that divide a vocabulary, as threads."""

    def __init__(self, size: int, vocab_size: int) -> None:
        self.columns, self.vocab_size, self.meeting = dealt(vocab_size, size), vocab_size, Meeting(size)
        self.counts: dict[int, torch.Tensor] = {}
        """The tables of the last draw's penalties, by rank."""
        self._groups = [Exchange(self.meeting, rank) for rank in range(size)]

    def run(self, compute: Callable[[DividedSampler, int], Any]) -> list[Any]:
        def work(group: Exchange) -> Any:
            with self.meeting.turn:
                return compute(DividedSampler(group, self.columns[group.rank], self.vocab_size), group.rank)

        found = together(self._groups, work)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found

    def draw(self, logits: torch.Tensor, batch: SamplingBatch, draws: Draws) -> list[DeviceSample]:
        packed, filters = triton_launch.pack_draws(draws, logits), Filters.of(draws.settings, self.vocab_size)

        def compute(sampler: DividedSampler, rank: int) -> DeviceSample:
            first, end = self.columns[rank]
            own = batch
            if batch.penalties is not None:
                tables = {
                    name: getattr(batch.penalties, name)[:, first:end].contiguous()
                    for name in ("in_prompt", "in_output")
                }
                own = own._replace(penalties=batch.penalties._replace(**tables))
                self.counts[rank] = tables["in_output"]
            if batch.masks is not None:
                bits = batch.masks.bits.copy() if rank == 0 else np.zeros_like(batch.masks.bits)
                own = own._replace(masks=TokenMasks(batch.masks.rows, bits))
            return sampler.draw(logits[:, first:end].contiguous(), own, packed, filters)

        return self.run(compute)


def logits_of(num_rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Return logits of which many are equal, zeros of both signs among them."""
    found = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    return ((found * spread * 4).round() / 4).to(DEVICE)


def draws_of(cases: list[dict[str, Any]], position: int) -> Draws:
    own = np.zeros(len(cases), dtype=np.int64)
    keys = randomness.keys(np.arange(len(cases), dtype=np.uint64), own, own + position)
    parameters = {name: [each.get(name, neutral) for each in cases] for name, neutral in NEUTRAL.items()}
    return Draws(DRAWS.filled(len(cases), {name: np.array(each) for name, each in parameters.items()}), keys)


NEUTRAL: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
CASES: list[dict[str, Any]] = [
    {"temperature": 0.0}, {}, {"temperature": 4.0}, {"min_p": 0.2}, {"top_k": 7}, {"top_k": 1, "temperature": 1.7},
    {"top_p": 0.6, "temperature": 0.3}, {"top_p": 1e-6}, {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 200, "top_p": 0.9999, "temperature": 8.0}, {"top_p": 0.9999, "temperature": 9.0},
]  # fmt: skip


def assert_same(ranks: Ranks, logits: torch.Tensor, batch: SamplingBatch, draws: Draws) -> None:
    expected = triton_launch.draw_tokens(logits, copied(batch), triton_launch.pack_draws(draws, logits)).read()
    first, *others = ranks.draw(logits, batch, draws)
    found = first.read()
    assert found.finite.tolist() == expected.finite.tolist()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert all(torch.equal(each.tokens, first.tokens) for each in others)
    if batch.reports is not None:
        assert found.logprobs is not None
        assert expected.logprobs is not None
        for place in np.flatnonzero(expected.finite[batch.reports.rows]).tolist():
            width = batch.reports.widths[place]
            for field in Logprobs._fields:
                ours, theirs = (np.asarray(getattr(each, field)) for each in (found.logprobs, expected.logprobs))
                assert ours[place].reshape(-1)[:width].tolist() == theirs[place].reshape(-1)[:width].tolist()


def copied(batch: SamplingBatch) -> SamplingBatch:
    """Return the batch with counts of its own."""
    if batch.penalties is None:
        return batch
    return batch._replace(penalties=batch.penalties._replace(in_output=batch.penalties.in_output.clone()))


def penalties_of(rows: list[int], vocab_size: int) -> Penalties:
    generator, shape = torch.Generator().manual_seed(3), (len(rows), vocab_size)
    settings = PENALTIES.filled(
        len(rows), {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2}
    )
    in_prompt = torch.rand(shape, generator=generator) < 0.3
    in_output = torch.randint(0, 3, shape, generator=generator, dtype=torch.int32)
    return Penalties(np.array(rows), settings, np.arange(len(rows)), in_prompt.to(DEVICE), in_output.to(DEVICE))


def masks_of(rows: list[int], vocab_size: int, share: float, seed: int) -> TokenMasks:
    generator = np.random.default_rng(seed)
    fits = generator.random((len(rows), -(-vocab_size // 32) * 32)) < share
    fits[:, generator.integers(vocab_size)] = True
    return TokenMasks(np.array(rows), np.packbits(fits, axis=1, bitorder="little").view(np.int32))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "vocab_size"), [(2, 45), (3, 301)])
def test_tokens_and_reports_are_those_of_one_device(size: int, vocab_size: int) -> None:
    ranks, last = Ranks(size, vocab_size), vocab_size - 1
    reports = Reports(
        np.array([0, 1, 4, 8]), np.array([2, 0, 0, 5]),
        NamedTokens(np.array([2, 2]), np.array([0, 1]), np.array([last, 0])),
    )  # fmt: skip
    edits = Edits(np.array([2, 3, 3]), np.array([last, 0, last]), np.array([30.0, -np.inf, 2.5], dtype=np.float32))
    batch = SamplingBatch(None, edits, penalties_of([1, 7], vocab_size), reports, masks_of([5, 6], vocab_size, 0.1, 5))
    for position in range(3):
        logits = logits_of(len(CASES), vocab_size, position)
        logits[:, vocab_size // 2 :] -= 2.0 * position  # the likeliest tokens are in one part, or in all
        logits[9, [3, last]] = logits[9].max() + 4
        if position == 2:
            logits[0, last], logits[3, 2], logits[10] = torch.nan, torch.inf, -torch.inf
        assert_same(ranks, logits, batch if position else SamplingBatch(), draws_of(CASES, position))


def test_penalties_count_the_tokens_that_are_drawn() -> None:
    ranks, logits, draws = Ranks(2, 50), logits_of(2, 50, 1), draws_of([{}, {}], 0)
    batch = SamplingBatch(penalties=penalties_of([0, 1], 50))
    whole = copied(batch)
    triton_launch.draw_tokens(logits, whole, triton_launch.pack_draws(draws, logits))
    ranks.draw(logits, batch, draws)
    assert whole.penalties is not None
    assert batch.penalties is not None
    assert torch.equal(torch.cat([ranks.counts[0], ranks.counts[1]], dim=1), whole.penalties.in_output)
    assert int((whole.penalties.in_output - batch.penalties.in_output).sum()) == 2


def test_rows_behind_proposed_tokens_are_those_of_one_device() -> None:
    """The first request samples all that is proposed, the second only the first token."""
    ranks, logits, draws = Ranks(2, 50), logits_of(7, 50, 3, 0.2), draws_of([{"temperature": 0.0}] * 7, 0)
    logits[1:4] = logits[0]
    places, packed = np.array([0, 0, 0, 0, 1, 1, 1]), triton_launch.pack_draws(draws, logits)
    given = penalties_of(list(range(7)), 50)
    proposed = np.full(7, -1)
    batch = SamplingBatch(penalties=given._replace(count_rows=places, proposed=proposed))
    for row in (0, 1, 2, 4, 5):
        drawn = triton_launch.draw_tokens(logits, copied(batch), packed).read().token_ids[row]
        proposed[row + 1] = (drawn + (row == 5)) % 50
    whole = copied(batch)
    expected = triton_launch.draw_tokens(logits, whole, packed).read().token_ids
    assert_same(ranks, logits, batch, draws)
    assert whole.penalties is not None
    assert torch.equal(torch.cat([ranks.counts[0], ranks.counts[1]], dim=1), whole.penalties.in_output)
    added = (whole.penalties.in_output - given.in_output).cpu().numpy()
    for place, own in enumerate((expected[:4], expected[4:6])):
        assert added[place].tolist() == np.bincount(own, minlength=50).tolist()


def test_reports_of_prompts_are_those_of_one_device() -> None:
    ranks, logits = Ranks(3, 90), logits_of(4, 90, 4)
    tokens = torch.tensor([0, 89, 31, 45], device=DEVICE)
    reports = Reports(np.arange(4), np.array([3, 0, 40, 60]))
    expected = triton_launch.report(logits, tokens, reports)

    def compute(sampler: DividedSampler, rank: int) -> Any:
        first, end = ranks.columns[rank]
        return sampler.report(logits[:, first:end].contiguous(), tokens, reports)

    values, ids = ranks.run(compute)[0]
    for row, width in enumerate(reports.num_top.tolist()):
        for ours, theirs in ((values, expected[0]), (ids, expected[1])):
            assert ours[row, : 1 + width].tolist() == theirs[row, : 1 + width].tolist()


@pytest.mark.sample("*top_k': 40*", "*temperature': 0.0}", "{}")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_row_is_gathered(case: dict[str, Any]) -> None:
    """Bytes do not depend on the vocabulary, so these are those of any."""
    found = []
    for vocab_size in (250, 500):
        ranks = Ranks(2, vocab_size)
        assert_same(ranks, logits_of(1, vocab_size, 5), SamplingBatch(), draws_of([case], 1))
        found.append(ranks.meeting.num_bytes)
    of_filters = (case.get("top_k", 0) > 0) + (case.get("top_p", 1.0) < 1.0)
    assert found[0] == found[1] <= 2 * (8 + 8 + 8 + 8 + of_filters * 6 * 64 * 8)


@pytest.mark.slow
@settings(max_examples=num_examples(60), deadline=None)
@given(
    cases=st.lists(st.fixed_dictionaries({}, optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 9.0]), "top_k": st.sampled_from([1, 5, 60]),
        "top_p": st.sampled_from([1e-7, 0.3, 0.9, 0.9999]), "min_p": st.sampled_from([0.01, 0.3, 1.0]),
    }), min_size=1, max_size=4),
    seed=st.integers(0, 1000), spread=st.sampled_from([0.1, 1.0, 8.0]), size=st.sampled_from([2, 3]),
)  # fmt: skip
def test_any_draws_are_those_of_one_device(cases: list[dict[str, Any]], seed: int, spread: float, size: int) -> None:
    logits = logits_of(len(cases), 65, seed, spread)
    assert_same(Ranks(size, 65), logits, SamplingBatch(), draws_of(cases, seed))
