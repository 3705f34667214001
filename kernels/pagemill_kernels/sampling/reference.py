"""The order of sampling, on the CPU: logits -> masks -> bias and forbidden tokens -> penalties -> greedy, or
temperature -> filters -> Gumbel-max. One row's values never touch another row's."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pagemill_kernels.sampling import filters, randomness
from pagemill_kernels.sampling.arithmetic import REACH
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

_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)
"""[256, 8]: what a byte of a mask adds to the logits of its eight tokens; four times as fast as choosing them."""


def sample_tokens(logits: Tensor, batch: SamplingBatch) -> SampledTokens:
    """One token for each row of logits, float32 [rows, vocab], which are overwritten."""
    best, token_ids = _best(logits)
    # A NaN anywhere makes the maximum NaN; -inf also comes only from a broken forward pass, but is harmless here.
    finite = np.isfinite(best)
    if batch.is_plain:
        return SampledTokens(token_ids, finite, None)

    logits = logits.cpu()
    raw_logits = None if batch.reports is None else logits[torch.from_numpy(batch.reports.rows)]
    chosen = _change(logits, batch) if batch.masks or batch.edits or batch.penalties else token_ids
    if batch.draws is not None:
        drawn = np.flatnonzero((batch.draws.temperature > 0) & finite)
        chosen[drawn] = draw(logits[torch.from_numpy(drawn)], batch.draws.at(drawn))
    if batch.penalties is not None:
        count(batch.penalties, chosen)
    if batch.reports is None or raw_logits is None:
        return SampledTokens(chosen, finite, None)
    return SampledTokens(chosen, finite, report(raw_logits, chosen, batch.reports))


def _best(logits: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Each row's largest logit and its token, the first one of equals."""
    if logits.device.type == "cpu":  # numpy's search is four times as fast as torch's
        rows = logits.numpy()
        token_ids = rows.argmax(-1)
        return rows[np.arange(len(rows)), token_ids], token_ids
    best, token_ids = logits.max(-1)
    return best.cpu().numpy(), token_ids.cpu().numpy()


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """-inf for every token without a bit."""
    values = logits.numpy()
    vocab_size = values.shape[1]
    addends = np.empty((masks.bits.shape[1] * 4, 8), dtype=np.float32)
    of_row = addends.reshape(-1)[:vocab_size]
    for row, bits in zip(masks.rows.tolist(), masks.bits.view(np.uint8), strict=True):
        _ADDENDS.take(bits, axis=0, out=addends, mode="clip")  # "raise" would copy
        values[row] += of_row


def add_edits(logits: Tensor, edits: Edits) -> None:
    logits[torch.from_numpy(edits.rows), torch.from_numpy(edits.token_ids)] += torch.from_numpy(edits.biases)


def apply_penalties(logits: Tensor, penalties: Penalties) -> None:
    """Repetition as in CTRL (arXiv 1909.05858): positive logits of seen tokens are divided, others multiplied."""
    at, of = torch.from_numpy(penalties.rows), torch.from_numpy(penalties.count_rows)
    picked = logits[at]
    counts = penalties.in_output[of]
    repetition = _column(penalties.repetition)
    seen = penalties.in_prompt[of] | (counts > 0)
    repeated = torch.where(picked > 0, picked / repetition, picked * repetition)
    picked = torch.where(seen, repeated, picked)
    picked -= _column(penalties.frequency) * counts
    picked -= _column(penalties.presence) * (counts > 0)
    logits[at] = picked


def draw(logits: Tensor, draws: Draws) -> NDArray[np.int64]:
    """A draw from softmax(logits / temperature) restricted by the rows' filters. logits is overwritten."""
    num_rows = len(logits)
    if num_rows == 0:
        return np.zeros(0, dtype=np.int64)
    logits.sub_(logits.amax(-1, keepdim=True)).div_(_column(draws.temperature))
    filters.apply_min_p(logits, draws.min_p)
    filters.apply_top_k_top_p(logits, draws.top_k, draws.top_p)
    # The best token is at 0 now: only tokens within reach of it can win.
    at, token_ids = (index.numpy() for index in (logits > -REACH).nonzero(as_tuple=True))
    noisy = logits.numpy()[at, token_ids] + randomness.gumbel(draws.keys[at], token_ids)
    return token_ids[_argmax_by_row(at, noisy, num_rows)]


def count(penalties: Penalties, token_ids: NDArray[np.int64]) -> None:
    of, tokens = torch.from_numpy(penalties.count_rows), torch.from_numpy(token_ids[penalties.rows])
    penalties.in_output[of, tokens] += 1


def report(raw_logits: Tensor, token_ids: NDArray[np.int64], reports: Reports) -> Logprobs:
    """raw_logits: of the reports' rows, is overwritten; token_ids: of the whole batch."""
    chosen = raw_logits.gather(1, torch.from_numpy(token_ids[reports.rows]).unsqueeze(1))
    # Row by row, numpy counts three times as fast as torch sums.
    ranks = np.array([1 + np.count_nonzero(better) for better in (raw_logits > chosen).numpy()])
    top, top_ids = raw_logits.topk(int(reports.num_top.max()), dim=-1)
    if reports.named is not None:
        top, top_ids = _with_named(raw_logits, top, top_ids, reports)
    best = raw_logits.amax(-1, keepdim=True)
    total = raw_logits.sub_(best).exp_().sum(-1, keepdim=True).log_()
    chosen, top = chosen - best - total, top - best - total
    return Logprobs(chosen.squeeze(1).numpy(), ranks, top.numpy(), top_ids.numpy())


def _with_named(raw_logits: Tensor, top: Tensor, top_ids: Tensor, reports: Reports) -> tuple[Tensor, Tensor]:
    assert reports.named is not None
    places, columns, token_ids = (torch.from_numpy(each) for each in reports.named)
    extra = (0, int(reports.widths.max()) - top.shape[1])
    top, top_ids = functional.pad(top, extra), functional.pad(top_ids, extra)
    top[places, columns], top_ids[places, columns] = raw_logits[places, token_ids], token_ids
    return top, top_ids


def _change(logits: Tensor, batch: SamplingBatch) -> NDArray[np.int64]:
    """Apply what rows ask for; the best tokens after it."""
    if batch.masks is not None:
        apply_masks(logits, batch.masks)
    if batch.edits is not None:
        add_edits(logits, batch.edits)
    if batch.penalties is not None:
        apply_penalties(logits, batch.penalties)
    token_ids: NDArray[np.int64] = logits.numpy().argmax(-1)
    return token_ids


def _column(values: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(values).unsqueeze(1)


def _argmax_by_row(at: NDArray[np.int64], values: NDArray[np.float32], num_rows: int) -> NDArray[np.int64]:
    """For values grouped by the sorted row numbers `at`, the index of each row's first maximum."""
    starts = np.searchsorted(at, np.arange(num_rows))
    best = np.maximum.reduceat(values, starts)
    winners = np.flatnonzero(values == best[at])
    return winners[np.searchsorted(at[winners], np.arange(num_rows))]
