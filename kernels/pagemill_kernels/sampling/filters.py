"""Which candidates of a row may be drawn: those above min_p, of these the top_k best, of these the first that have
top_p of the mass. The order is by falling logit and, among equal ones, by rising token id.

    x = (logit - the row's maximum) / temperature, in float32, each operation rounded once
    min_p: tokens with x < log(min_p) are dropped (`arithmetic.log`)
    top_p: a token stays while the `arithmetic.mass` of those before it is below share_of(the mass of all, top_p)
    The first token always stays.

A full sort of the vocabulary is the costliest thing a sampler can do, so the cut is searched among the best
`SHORTLIST` tokens first; only rows whose cut lies further down are sorted whole.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_kernels.sampling import arithmetic

SHORTLIST = 1024


def log_min_p(min_p: NDArray[np.float32]) -> NDArray[np.float32]:
    """The lowest x that stays, -inf where min_p is 0."""
    some = min_p > 0
    lowest = arithmetic.log(np.where(some, min_p, np.float32(1.0)))
    return np.where(some, lowest, np.float32(-np.inf))


def apply_min_p(x: Tensor, min_p: NDArray[np.float32]) -> None:
    """Drop tokens less likely than min_p times the most likely one. x: [rows, vocab]; what is dropped becomes -inf."""
    chosen = torch.from_numpy(np.flatnonzero(min_p > 0))
    if len(chosen) == 0:
        return
    picked = x[chosen]
    floor = torch.from_numpy(log_min_p(min_p)[chosen.numpy()]).unsqueeze(1)
    x[chosen] = picked.masked_fill(picked < floor, float("-inf"))


def apply_top_k_top_p(x: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> None:
    """Keep the top_k most likely tokens, and of these the smallest set with mass top_p. At least one stays."""
    vocab_size = x.shape[1]
    pending = np.flatnonzero((top_k < vocab_size) | (top_p < 1.0))
    for width in (min(SHORTLIST, vocab_size), vocab_size):
        if len(pending) == 0:
            return
        picked = x[torch.from_numpy(pending)]
        values = picked.topk(width, dim=-1).values
        counts, decided = _kept(picked, values.numpy(), top_k[pending], top_p[pending])
        at = np.flatnonzero(decided)
        cut = values[torch.from_numpy(at), torch.from_numpy(counts[at] - 1)]
        x[torch.from_numpy(pending[at])] = _above(picked[torch.from_numpy(at)], cut, counts[at])
        pending = pending[~decided]


def _kept(
    x: Tensor, values: NDArray[np.float32], top_k: NDArray[np.int64], top_p: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For the `width` best values, in falling order: how many stay; and for which rows the cut lies among them."""
    width, vocab_size = values.shape[1], x.shape[1]
    cut_by_k = top_k <= width
    counts = np.minimum(top_k, width)
    with_p = np.flatnonzero((top_p < 1.0) & (cut_by_k | (top_k >= vocab_size)))
    for row in with_p.tolist():
        masses = arithmetic.mass(values[row, : counts[row]])
        running = masses.cumsum()
        total = running[-1] if cut_by_k[row] else arithmetic.total_mass(x[row].numpy())
        limit = arithmetic.share_of(total, arithmetic.shares(top_p[row]))
        counts[row] = np.count_nonzero(running - masses < limit)
    cut_by_p = np.zeros(len(x), dtype=np.bool_)
    cut_by_p[with_p] = counts[with_p] < width
    return counts, cut_by_k | cut_by_p | (width == vocab_size)


def _above(x: Tensor, cut: Tensor, counts: NDArray[np.int64]) -> Tensor:
    """Each row's first `counts` tokens, the last of which has the value `cut`; the others are -inf."""
    kept = x.masked_fill(x < cut.unsqueeze(1), float("-inf"))
    too_many = torch.from_numpy(np.flatnonzero((kept > float("-inf")).sum(-1).numpy() > counts))
    if len(too_many) == 0:
        return kept
    ties = kept[too_many] == cut[too_many].unsqueeze(1)
    above = (kept[too_many] > cut[too_many].unsqueeze(1)).sum(-1)
    room = torch.from_numpy(counts)[too_many] - above
    kept[too_many] = kept[too_many].masked_fill(ties & (ties.cumsum(-1) > room.unsqueeze(1)), float("-inf"))
    return kept
