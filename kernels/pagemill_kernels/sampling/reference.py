"""The specification of sampling over arrays: masks, biases, penalties, then greedy choice or a filtered draw.

The draw scales by temperature, filters, and uses Gumbel-max. One row's values never affect another row's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.sampling import filters, randomness
from pagemill_kernels.sampling.arithmetic import REACH, Floats
from pagemill_kernels.sampling.batch import (
    Draws,
    Edits,
    Logprobs,
    Penalties,
    Reports,
    SampledTokens,
    SamplingBatch,
    TokenMasks,
)
from pagemill_kernels.sampling.penalties import apply_penalties

_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)
"""[256, 8]: addends of a mask byte for the logits of its eight tokens; four times as fast as np.where."""


@np.errstate(all="ignore")
def sample_tokens(logits: Floats, batch: SamplingBatch) -> SampledTokens:
    """Sample one token for each row of logits, [rows, vocab], which are overwritten."""
    token_ids = logits.argmax(-1)
    best = logits[np.arange(len(logits)), token_ids]
    # A NaN anywhere makes the maximum NaN; -inf also comes only from a broken forward pass, but is harmless here.
    finite = np.isfinite(best)
    if batch.is_plain:
        return SampledTokens(token_ids, finite, None)

    raw_logits = None if batch.reports is None else logits[batch.reports.rows]
    chosen = _change(logits, batch) if batch.masks or batch.edits or batch.penalties else token_ids
    if batch.draws is not None:
        drawn = np.flatnonzero(filters.is_drawn(batch.draws.settings) & finite)
        chosen[drawn] = draw(logits[drawn], batch.draws.at(drawn))
    if batch.penalties is not None:
        count(batch.penalties, chosen)
    if batch.reports is None or raw_logits is None:
        return SampledTokens(chosen, finite, None)
    return SampledTokens(chosen, finite, report(raw_logits, chosen, batch.reports))


def apply_masks(logits: Floats, masks: TokenMasks) -> None:
    """Set the logits of every token without a bit to -inf."""
    vocab_size = logits.shape[1]
    addends = np.empty((masks.bits.shape[1] * 4, 8), dtype=np.float32)
    of_row = addends.reshape(-1)[:vocab_size]
    for row, bits in zip(masks.rows.tolist(), masks.bits.view(np.uint8), strict=True):
        _ADDENDS.take(bits, axis=0, out=addends, mode="clip")  # "raise" would copy
        logits[row] += of_row


def add_edits(logits: Floats, edits: Edits) -> None:
    logits[edits.rows, edits.token_ids] += edits.biases


def draw(logits: Floats, draws: Draws) -> NDArray[np.int64]:
    """Draw from softmax(logits / temperature) restricted by the rows' filters. Overwrites logits."""
    num_rows = len(logits)
    if num_rows == 0:
        return np.zeros(0, dtype=np.int64)
    logits -= logits.max(-1, keepdims=True)
    logits /= draws.settings["temperature"][:, None]
    filters.apply(logits, draws.settings)
    # The best token is at 0 now: only tokens within REACH of it can win.
    at, token_ids = np.nonzero(logits > -REACH)
    noisy = logits[at, token_ids] + randomness.gumbel(draws.keys[at], token_ids)
    return token_ids[_argmax_by_row(at, noisy, num_rows)]


def count(penalties: Penalties, token_ids: NDArray[np.int64]) -> None:
    penalties.in_output[penalties.count_rows, token_ids[penalties.rows]] += 1


@np.errstate(all="ignore")
def report(raw_logits: Floats, token_ids: NDArray[np.int64], reports: Reports) -> Logprobs:
    """Return log probabilities.

    raw_logits: of the reports' rows, overwritten; token_ids: of the whole batch.
    """
    chosen = raw_logits[np.arange(len(raw_logits)), token_ids[reports.rows]]
    ranks = np.array([1 + np.count_nonzero(row > own) for row, own in zip(raw_logits, chosen, strict=True)])
    top, top_ids = likeliest(raw_logits, int(reports.num_top.max()))
    if reports.named is not None:
        top, top_ids = _with_named(raw_logits, top, top_ids, reports)
    best = raw_logits.max(-1)
    raw_logits -= best[:, None]
    total = np.log(np.exp(raw_logits, out=raw_logits).sum(-1))
    return Logprobs(chosen - best - total, ranks, top - best[:, None] - total[:, None], top_ids)


def likeliest(x: Floats, width: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return each row's `width` largest values, descending, and their tokens; of equal ones the lower token first."""
    values = filters.largest(x, width) if width else np.empty((len(x), 0), dtype=np.float32)
    token_ids = np.empty(values.shape, dtype=np.int64)
    for row in range(len(x) if width else 0):
        found = np.flatnonzero(x[row] >= values[row, -1])
        order = np.argsort(-x[row, found], kind="stable")[:width]
        token_ids[row] = found[order] if len(order) == width else 0  # NaN: such a row is never read
    return values, token_ids


def _with_named(
    raw_logits: Floats, top: Floats, top_ids: NDArray[np.int64], reports: Reports
) -> tuple[Floats, NDArray[np.int64]]:
    assert reports.named is not None
    places, columns, token_ids = reports.named
    extra = ((0, 0), (0, int(reports.widths.max()) - top.shape[1]))
    top, top_ids = np.pad(top, extra), np.pad(top_ids, extra)
    top[places, columns], top_ids[places, columns] = raw_logits[places, token_ids], token_ids
    return top, top_ids


def _change(logits: Floats, batch: SamplingBatch) -> NDArray[np.int64]:
    """Apply masks, edits and penalties, and return the best tokens."""
    if batch.masks is not None:
        apply_masks(logits, batch.masks)
    if batch.edits is not None:
        add_edits(logits, batch.edits)
    if batch.penalties is not None:
        apply_penalties(logits, batch.penalties)
    token_ids: NDArray[np.int64] = logits.argmax(-1)
    return token_ids


def _argmax_by_row(at: NDArray[np.int64], values: NDArray[np.float32], num_rows: int) -> NDArray[np.int64]:
    """Return the index of each row's first maximum, for values grouped by the sorted row numbers `at`."""
    starts = np.searchsorted(at, np.arange(num_rows))
    best = np.maximum.reduceat(values, starts)
    winners = np.flatnonzero(values == best[at])
    return winners[np.searchsorted(at[winners], np.arange(num_rows))]
