"""The filters of sampling, which decide which candidates of a row may be drawn, and the parameters of draws.

Each filter applies to what the one before it left: min_p, then top_k, then top_p. Candidates are ordered by falling
logit and, for equal logits, by rising token id. The C++ and Triton samplers implement the same filters.

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
from pagemill_kernels.sampling.arithmetic import WHOLE_SHARE, Floats
from pagemill_kernels.sampling.columns import Column, Columns, Settings

SHORTLIST = 1024
MIN_TEMPERATURE = 1e-5
"""Any lower temperature is greedy: dividing by it would leave float32's range."""
ALL_TOKENS = 2**31 - 1


def log_share(value: float) -> float:
    """Return the x of a token this many times as likely as the best one; -inf for 0."""
    exact = np.array([value], dtype=np.float32)
    return float(arithmetic.log(exact)[0]) if exact[0] > 0 else -np.inf


DRAWS = Columns(
    # 0: the row takes its best token, and the other columns have no effect.
    temperature=Column(np.float32, 1.0, lambda value: value if value >= MIN_TEMPERATURE else 0.0),
    # How many tokens are kept.
    top_k=Column(np.int32, 0, lambda value: value if value > 0 else ALL_TOKENS),
    # The share of the mass that is kept, in parts of 2^24.
    top_p=Column(np.int32, 1.0, arithmetic.share),
    # The lowest x that is kept.
    min_p=Column(np.float32, 0.0, log_share),
)
"""The parameters of draws, with what is stored for each."""


def is_drawn(settings: Settings) -> NDArray[np.bool_]:
    """Return which rows draw; the others take their best token."""
    drawn: NDArray[np.bool_] = settings["temperature"] > 0
    return drawn


def apply(x: Floats, settings: Settings) -> None:
    """Drop the tokens that may not be drawn, by setting them to -inf. x: [rows, vocab]; settings: `DRAWS` by row."""
    drop_below(x, settings["min_p"])
    apply_top_k_top_p(x, settings["top_k"], settings["top_p"])


def drop_below(x: Floats, lowest: NDArray[np.float32]) -> None:
    """Drop tokens below the row's lowest x."""
    chosen = np.flatnonzero(lowest > -np.inf)
    if len(chosen) == 0:
        return
    picked = x[chosen]
    picked[picked < lowest[chosen, None]] = -np.inf
    x[chosen] = picked


def apply_top_k_top_p(x: Floats, top_k: NDArray[np.int32], shares: NDArray[np.int32]) -> None:
    """Keep the top_k most likely tokens, and of these the smallest set with this share of the mass, at least one."""
    vocab_size = x.shape[1]
    pending = np.flatnonzero((top_k < vocab_size) | (shares < WHOLE_SHARE))
    for width in (min(SHORTLIST, vocab_size), vocab_size):
        if len(pending) == 0:
            return
        picked = x[pending]
        values = largest(picked, width)
        counts, decided = _kept(picked, values, top_k[pending], shares[pending])
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
    x: Floats, values: Floats, top_k: NDArray[np.int32], shares: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return how many of the best values of each row are kept, and for which rows the cut is among them.

    values: the `width` best values of each row, descending.
    """
    width, vocab_size = values.shape[1], x.shape[1]
    cut_by_k = top_k <= width
    counts = np.minimum(top_k, width).astype(np.int64)
    with_p = np.flatnonzero((shares < WHOLE_SHARE) & (cut_by_k | (top_k >= vocab_size)))
    for row in with_p.tolist():
        masses = arithmetic.mass(values[row, : counts[row]])
        running = masses.cumsum()
        total = running[-1] if cut_by_k[row] else arithmetic.total_mass(x[row])
        limit = arithmetic.share_of(total, int(shares[row]))
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
