"""Triton kernels of a rank's part of a vocabulary: the measures of its tokens up to some keys, and its draws.

The arithmetic is that of `triton_body`; `triton_parts` launches these kernels, and exchanges what they find.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill_kernels.sampling.triton_body import (
    KEY_HIGH,
    KEY_LOW,
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    gumbel,
    mass_of,
    scaled,
    share_of,
    unit,
)

PIVOTS: tl.constexpr = tl.constexpr(64)
"""Keys with which one pass compares."""
BEGIN: tl.constexpr = tl.constexpr(0)
LAST: tl.constexpr = tl.constexpr(1)
BELOW: tl.constexpr = tl.constexpr(2)
TARGET: tl.constexpr = tl.constexpr(3)
KEPT: tl.constexpr = tl.constexpr(4)
DROPPED: tl.constexpr = tl.constexpr(5)
"""The numbers of a search, int64 by row: the cut is within BEGIN and LAST, BELOW is the measure before BEGIN; at the
end, how many tokens at the cut stay and how many do not."""


@triton.jit
def pivots_of(begin, last):
    """Return keys in equal steps, the last of which is `last`."""
    span = last - begin
    return tl.minimum(begin + (tl.arange(0, PIVOTS) + 1) * (span // PIVOTS + 1) - 1, last)


@triton.jit
def scale_of(settings_ptr, num_rows, row):
    """Return a row's temperature, and the lowest x that is kept. Rows without a draw get any temperature."""
    temperature = tl.load(settings_ptr + TEMPERATURE * num_rows + row).to(tl.float32, bitcast=True)
    floor = tl.load(settings_ptr + MIN_P * num_rows + row).to(tl.float32, bitcast=True)
    return tl.where(temperature > 0.0, temperature, 1.0), floor


@triton.jit(do_not_specialize=["num_rows"])
def sum_part(
    settings_ptr, num_rows, logits_ptr, maximum_ptr, search_ptr, sums_ptr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Compute the counts or masses of a row's candidates from BEGIN up to each pivot."""
    row = tl.program_id(0).to(tl.int64)
    temperature, floor = scale_of(settings_ptr, num_rows, row)
    maximum = tl.load(maximum_ptr + row)
    begin = tl.load(search_ptr + BEGIN * num_rows + row).to(tl.int32)
    pivots = pivots_of(begin, tl.load(search_ptr + LAST * num_rows + row).to(tl.int32))
    sums = tl.zeros([PIVOTS, BLOCK], tl.int64)
    for start in range(0, TOKENS, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x, key = scaled(logits_ptr + row * TOKENS, token, maximum, temperature, TOKENS)
        inside = (key >= begin) & (x >= floor) & (token < TOKENS)
        amount = inside.to(tl.int64)
        if BY_MASS:
            amount = tl.where(inside, mass_of(tl.minimum(x, 0.0)), 0)  # above 0: a row that is not finite
        sums += tl.where(key[None, :] <= pivots[:, None], amount[None, :], 0)
    tl.store(sums_ptr + row * PIVOTS + tl.arange(0, PIVOTS), tl.sum(sums, 1))


@triton.jit(do_not_specialize=["num_rows"])
def narrow(settings_ptr, num_rows, sums_ptr, search_ptr, IS_FIRST: tl.constexpr, BY_MASS: tl.constexpr):
    """Narrow a row's search by the sums of all ranks. The first pass decides what the measure must reach."""
    row = tl.program_id(0).to(tl.int64)
    search_ptr += row
    begin = tl.load(search_ptr + BEGIN * num_rows).to(tl.int32)
    last = tl.load(search_ptr + LAST * num_rows).to(tl.int32)
    below = tl.load(search_ptr + BELOW * num_rows)
    target = tl.load(search_ptr + TARGET * num_rows)
    pivots = pivots_of(begin, last)
    sums = tl.load(sums_ptr + row * PIVOTS + tl.arange(0, PIVOTS))
    if IS_FIRST:
        total = tl.max(sums, 0)
        if BY_MASS:
            dropped = tl.load(search_ptr + DROPPED * num_rows)
            share = tl.load(settings_ptr + TOP_P * num_rows + row)
            target = share_of(total - dropped * unit(last, True), share)
        else:
            target = tl.minimum(tl.load(settings_ptr + TOP_K * num_rows + row).to(tl.int64), total)
        tl.store(search_ptr + TARGET * num_rows, target)
    reached = below + sums
    enough = reached >= target
    end = tl.min(tl.where(enough, reached, 0x7FFFFFFFFFFFFFFF), 0)
    last = tl.min(tl.where(enough, pivots, last), 0)
    begin = tl.max(tl.where(enough, begin, pivots + 1), 0)
    below = tl.max(tl.where(enough, below, reached), 0)
    size = unit(last, BY_MASS)
    kept = (target - below + size - 1) // size
    tl.store(search_ptr + BEGIN * num_rows, begin.to(tl.int64))
    tl.store(search_ptr + LAST * num_rows, last.to(tl.int64))
    tl.store(search_ptr + BELOW * num_rows, below)
    tl.store(search_ptr + KEPT * num_rows, kept)
    tl.store(search_ptr + DROPPED * num_rows, (end - below) // size - kept)


@triton.jit(do_not_specialize=["num_rows", "first"])
def noisiest_of_part(
    settings_ptr, num_rows, logits_ptr, maximum_ptr, search_ptr, first, noisy_ptr, tokens_ptr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """Find the token of a row's part with the highest x + noise up to the cut, of those at the cut the first KEPT."""
    row = tl.program_id(0).to(tl.int64)
    temperature, floor = scale_of(settings_ptr, num_rows, row)
    maximum = tl.load(maximum_ptr + row)
    key_low = tl.load(settings_ptr + KEY_LOW * num_rows + row).to(tl.uint32, bitcast=True)
    key_high = tl.load(settings_ptr + KEY_HIGH * num_rows + row).to(tl.uint32, bitcast=True)
    cut = tl.load(search_ptr + LAST * num_rows + row).to(tl.int32)
    kept = tl.load(search_ptr + KEPT * num_rows + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    num_ties = tl.full((), 0, tl.int64)
    for start in range(0, TOKENS, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x, key = scaled(logits_ptr + row * TOKENS, token, maximum, temperature, TOKENS)
        stays = (key <= cut) & (x >= floor) & (token < TOKENS)
        if FILTERED:
            tie = (stays & (key == cut)).to(tl.int32)
            stays = stays & ((tie == 0) | (num_ties + tl.cumsum(tie, 0) <= kept))
            num_ties += tl.sum(tie, 0)
        noisy = x + gumbel(key_low, key_high, first + token)
        better = stays & (noisy > best)
        best_token = tl.where(better, token, best_token)
        best = tl.where(better, noisy, best)
    most = tl.max(best, 0)
    tl.store(noisy_ptr + row, most)
    tl.store(tokens_ptr + row, first + tl.min(tl.where(best == most, best_token, TOKENS - 1), 0).to(tl.int64))
