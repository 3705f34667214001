"""Samples on GPUs from a vocabulary that ranks divide, without the logits of all: the tokens and reports of
`triton_launch`, bit for bit.

Every rank finds what its columns contribute: best tokens, winners of draws, counts and integer masses, whose sums have
no order. Filters search their cut together: each pass adds the counts or masses up to some keys over all ranks, so no
row is ever gathered. Nothing waits for a device. `parts` is the counterpart for hosts, where rank 0 asks by messages.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
import triton
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.sampling import triton_launch
from pagemill_kernels.sampling.arithmetic import WHOLE_SHARE
from pagemill_kernels.sampling.batch import NUM_SETTINGS, Reports, SamplingBatch
from pagemill_kernels.sampling.columns import Settings
from pagemill_kernels.sampling.device_sample import DeviceSample, Report
from pagemill_kernels.sampling.filters import is_drawn
from pagemill_kernels.sampling.triton_body import LAST_KEY, TEMPERATURE
from pagemill_kernels.sampling.triton_parts_body import (
    BEGIN,
    BELOW,
    KEPT,
    LAST,
    PIVOTS,
    narrow,
    noisiest_of_part,
    sum_part,
)

NUM_PASSES = 6
"""Passes after which one key is left: `PIVOTS` to this power is more than `LAST_KEY`."""
NUM_FIELDS = 6
BLOCK, SUM_BLOCK, NUM_WARPS = 1024, 256, 8
_MAGNITUDE = 0x7FFFFFFF
_LEAST = -(1 << 63)


class ColumnRanks(Protocol):
    """The ranks that divide a vocabulary, in the order of its columns."""

    rank: int
    size: int

    def gather_alike(self, buffer: Tensor) -> Tensor:
        """Return what all ranks give, [ranks, ...]."""
        ...

    def add_integers(self, buffer: Tensor) -> None:
        """Replace integers by their sums over all ranks."""
        ...

    def broadcast(self, buffer: Tensor, sender: int) -> None: ...


class Filters(NamedTuple):
    """What the rows of a batch need, as all ranks know it."""

    draws: bool
    by_count: bool
    by_mass: bool

    @classmethod
    def of(cls, settings: Settings, vocab_size: int) -> Filters:
        """`settings`: records of `DRAWS`."""
        drawn = settings[is_drawn(settings)]
        by_count, by_mass = drawn["top_k"] < vocab_size, drawn["top_p"] < WHOLE_SHARE
        return cls(len(drawn) > 0, bool(by_count.any()), bool(by_mass.any()))


class DividedSampler:
    def __init__(self, group: ColumnRanks, columns: tuple[int, int], vocab_size: int) -> None:
        """`columns`: those of this rank, the first and the one behind the last."""
        self._group, (self._first, self._end), self._vocab_size = group, columns, vocab_size

    def draw(self, logits: Tensor, batch: SamplingBatch, settings: Tensor, filters: Filters) -> DeviceSample:
        """Sample like `triton_launch.draw_tokens`. All ranks call it, and get the tokens that rank 0 finds.

        logits: [rows, columns of this rank]; batch: the masks' bits are those of rank 0, the tables for penalties have
        the columns of this rank.
        """
        changed = self._changed(logits, batch)
        given = [self._best(each) for each in ([logits] if changed is logits else [changed, logits])]
        best = self._group.gather_alike(torch.stack(given)).amax(0)
        tokens, maximum, highest = _tokens(best[0]), _values(best[0]), _values(best[-1])
        if filters.draws:
            packed = settings.view(NUM_SETTINGS, -1)
            drawn = packed[TEMPERATURE.value].view(torch.float32) > 0
            scale = torch.where(maximum.isfinite(), maximum, 0.0)  # rows that are not finite draw nothing
            tokens = torch.where(drawn, self._winners(changed, scale, packed, filters), tokens)
        tokens = torch.where(highest.isfinite(), tokens, -1)
        self._group.broadcast(tokens, 0)
        if batch.penalties is not None:
            triton_launch.count(batch.penalties, tokens, self._first)
        return DeviceSample(
            tokens, None if batch.reports is None else self._report(logits, tokens, batch.reports, highest)
        )

    def report(self, logits: Tensor, tokens: Tensor, reports: Reports) -> Report:
        """Report like `triton_launch.report`. All ranks call it; rank 0 gets the result."""
        best = self._group.gather_alike(self._best(logits)).amax(0)
        return self._report(logits, tokens, reports, _values(best))

    def _changed(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        if batch.masks is None and batch.edits is None and batch.penalties is None:
            return logits
        changed = logits.clone()
        if batch.masks is not None:
            rows, bits = (launch.upload(each, logits.device) for each in batch.masks)
            self._group.broadcast(bits, 0)
            triton_launch.forbid(changed, rows, bits, self._first)
        if batch.edits is not None:
            edits = batch.edits
            own = np.flatnonzero((edits.token_ids >= self._first) & (edits.token_ids < self._end))
            if len(own):
                edits = type(edits)(edits.rows[own], edits.token_ids[own] - self._first, edits.biases[own])
                triton_launch.add_edits(changed, edits)
        if batch.penalties is not None:
            triton_launch.apply_penalties(changed, batch.penalties, self._first)
        return changed

    def _best(self, logits: Tensor) -> Tensor:
        found = logits.argmax(1)
        return _packed(logits.gather(1, found[:, None])[:, 0], found + self._first)

    def _winners(self, logits: Tensor, maximum: Tensor, settings: Tensor, filters: Filters) -> Tensor:
        """Return the tokens with the most x + noise up to the cut of the filters."""
        num_rows, size = logits.shape
        search = torch.zeros(NUM_FIELDS, num_rows, dtype=torch.int64, device=logits.device)
        search[LAST.value] = LAST_KEY.value
        search[KEPT.value] = self._vocab_size
        filtered = filters.by_count or filters.by_mass
        if filters.by_count:
            self._search(logits, maximum, settings, search, by_mass=False)
        if filters.by_mass:
            self._search(logits, maximum, settings, search, by_mass=True)
        if filtered:
            # Of tokens at the cut, those of earlier ranks come first.
            search[BEGIN.value] = search[LAST.value]
            ties = self._group.gather_alike(_sums(logits, maximum, settings, search, by_mass=False)[:, -1].contiguous())
            search[KEPT.value] -= ties[: self._group.rank].sum(0)
        noisy = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        noisiest_of_part[(num_rows,)](
            settings_ptr=settings, num_rows=num_rows, logits_ptr=logits, maximum_ptr=maximum, search_ptr=search,
            first=self._first, noisy_ptr=noisy, tokens_ptr=tokens, TOKENS=size, BLOCK=_block(size, BLOCK),
            FILTERED=filtered, enable_fp_fusion=False, num_warps=NUM_WARPS,
        )  # fmt: skip
        return _tokens(self._group.gather_alike(_packed(noisy, tokens)).amax(0))

    def _search(self, logits: Tensor, maximum: Tensor, settings: Tensor, search: Tensor, *, by_mass: bool) -> None:
        """Find the cut of a filter, within that of the one before it."""
        search[BEGIN.value], search[BELOW.value] = 0, 0
        for number in range(NUM_PASSES):
            sums = _sums(logits, maximum, settings, search, by_mass=by_mass)
            self._group.add_integers(sums)
            narrow[(len(logits),)](
                settings_ptr=settings, num_rows=len(logits), sums_ptr=sums, search_ptr=search, IS_FIRST=number == 0,
                BY_MASS=by_mass, enable_fp_fusion=False, num_warps=1,
            )  # fmt: skip

    def _report(self, logits: Tensor, tokens: Tensor, reports: Reports, highest: Tensor) -> Report:
        rows, width = launch.upload(reports.rows, logits.device), int(reports.num_top.max())
        asked, places = tokens[rows].clamp(min=0), rows
        if reports.named is not None:
            places = torch.cat([rows, rows[launch.upload(reports.named.places, logits.device)]])
            asked = torch.cat([asked, launch.upload(reports.named.token_ids, logits.device)])
        is_own = (asked >= self._first) & (asked < self._end)
        own = torch.where(is_own, asked - self._first, 0)
        bits = torch.where(is_own, logits[places, own].view(torch.int32), 0)
        self._group.add_integers(bits)
        values, best = bits.view(torch.float32), highest[rows]
        part = triton_launch.report_part(logits, rows, reports, best, values[: len(rows)].contiguous(), width)
        sums = torch.stack([part.masses, part.above])
        self._group.add_integers(sums)
        top = _packed(part.top, part.top_ids.long() + self._first)
        if part.top.shape[1] < width:
            top = torch.nn.functional.pad(top, (0, width - part.top.shape[1]), value=_LEAST)
        every = self._group.gather_alike(top).transpose(0, 1).flatten(1)
        likeliest = every.topk(width, dim=1).values if width else every
        found = triton_launch.PartOfReport(sums[0], sums[1], _values(likeliest), _tokens(likeliest).int())
        return triton_launch.finished_report(found, reports, best, values)


def _sums(logits: Tensor, maximum: Tensor, settings: Tensor, search: Tensor, *, by_mass: bool) -> Tensor:
    """Return the counts or masses of this rank's tokens up to each of the keys of a pass, int64 [rows, PIVOTS]."""
    num_rows, size = logits.shape
    sums = torch.empty(num_rows, PIVOTS.value, dtype=torch.int64, device=logits.device)
    sum_part[(num_rows,)](
        settings_ptr=settings, num_rows=num_rows, logits_ptr=logits, maximum_ptr=maximum, search_ptr=search,
        sums_ptr=sums, TOKENS=size, BLOCK=_block(size, SUM_BLOCK), BY_MASS=by_mass, enable_fp_fusion=False,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return sums


def _packed(values: Tensor, tokens: Tensor) -> Tensor:
    """Return integers that order as the values do, and of equal ones the lowest token as the largest. NaN becomes
    infinity, which is not finite either."""
    bits = torch.where(values.isnan(), torch.inf, values + 0.0).view(torch.int32)  # 0.0 and -0.0 are equal
    return ((bits ^ ((bits >> 31) & _MAGNITUDE)).long() << 32) | (_MAGNITUDE - tokens)


def _values(packed: Tensor) -> Tensor:
    bits = (packed >> 32).int()
    return (bits ^ ((bits >> 31) & _MAGNITUDE)).view(torch.float32)


def _tokens(packed: Tensor) -> Tensor:
    return _MAGNITUDE - (packed & _MAGNITUDE)


def _block(size: int, largest: int) -> int:
    return min(largest, int(triton.next_power_of_2(size)))
