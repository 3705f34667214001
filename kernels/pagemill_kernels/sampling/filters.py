"""The filters of sampling, which decide which candidates of a row may be drawn.

Each filter applies to what the one before it left: min_p, then top_k, then top_p. Candidates are ordered by falling
logit and, for equal logits, by rising token id.

    x = (logit - the row's maximum) / temperature, in float32, each operation rounded once
    min_p: tokens with x < log(min_p) are dropped (`arithmetic.log`)
    top_p: a token stays while the `arithmetic.mass` of those before it is below share_of(the mass of all, top_p)
    The first token always stays.

Sorting a whole vocabulary is slow, so the last candidate that stays is searched among the best `SHORTLIST` tokens
first. A row is sorted whole only if that candidate is not among them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.sampling import arithmetic
from pagemill_kernels.sampling.arithmetic import Floats

SHORTLIST = 1024


def log_min_p(min_p: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the lowest x that is kept, -inf where min_p is 0."""
    some = min_p > 0
    lowest = arithmetic.log(np.where(some, min_p, np.float32(1.0)))
    return np.where(some, lowest, np.float32(-np.inf))


def apply_min_p(x: Floats, min_p: NDArray[np.float32]) -> None:
    """Drop tokens less likely than min_p times the most likely one, by setting them to -inf. x: [rows, vocab]."""
    chosen = np.flatnonzero(min_p > 0)
    if len(chosen) == 0:
        return
    picked = x[chosen]
    picked[picked < log_min_p(min_p)[chosen, None]] = -np.inf
    x[chosen] = picked


def apply_top_k_top_p(x: Floats, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> None:
    """Keep the top_k most likely tokens, and of these the smallest set with mass top_p, at least one."""
    vocab_size = x.shape[1]
    pending = np.flatnonzero((top_k < vocab_size) | (top_p < 1.0))
    for width in (min(SHORTLIST, vocab_size), vocab_size):
        if len(pending) == 0:
            return
        picked = x[pending]
        values = largest(picked, width)
        counts, decided = _kept(picked, values, top_k[pending], top_p[pending])
        at = np.flatnonzero(decided)
        x[pending[at]] = _above(picked[at], values[at, counts[at] - 1], counts[at])
        pending = pending[~decided]


def largest(x: Floats, width: int) -> Floats:
    """Return the `width` largest values of each row, descending."""
    first = x.shape[1] - width
    found = np.partition(x, first, axis=-1)[:, first:] if first else x.copy()
    found.sort(axis=-1)
    return found[:, ::-1]


def _kept(
    x: Floats, values: Floats, top_k: NDArray[np.int64], top_p: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return how many of the best values of each row are kept, and for which rows the cut is among them.

    values: the `width` best values of each row, descending.
    """
    width, vocab_size = values.shape[1], x.shape[1]
    cut_by_k = top_k <= width
    counts = np.minimum(top_k, width)
    with_p = np.flatnonzero((top_p < 1.0) & (cut_by_k | (top_k >= vocab_size)))
    for row in with_p.tolist():
        masses = arithmetic.mass(values[row, : counts[row]])
        running = masses.cumsum()
        total = running[-1] if cut_by_k[row] else arithmetic.total_mass(x[row])
        limit = arithmetic.share_of(total, arithmetic.shares(top_p[row]))
        counts[row] = np.count_nonzero(running - masses < limit)
    cut_by_p = np.zeros(len(x), dtype=np.bool_)
    cut_by_p[with_p] = counts[with_p] < width
    return counts, cut_by_k | cut_by_p | (width == vocab_size)


def _above(x: Floats, cut: Floats, counts: NDArray[np.int64]) -> Floats:
    """Keep each row's first `counts` tokens, the last of which has the value `cut`; others become -inf, in place."""
    x[x < cut[:, None]] = -np.inf
    for row in np.flatnonzero(np.count_nonzero(x > -np.inf, axis=-1) > counts).tolist():
        ties = np.flatnonzero(x[row] == cut[row])
        room = counts[row] - np.count_nonzero(x[row] > cut[row])
        x[row, ties[room:]] = -np.inf
    return x
