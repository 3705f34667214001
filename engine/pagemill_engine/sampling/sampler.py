"""The order of sampling: logits -> bias -> minimum length -> penalties -> greedy, or temperature -> filters ->
Gumbel-max.

A batch of plain greedy rows takes a short path. One row's values never touch another row's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_engine.sampling import filters, processors, randomness
from pagemill_engine.sampling.logprobs import token_logprobs
from pagemill_engine.sampling.rows import SamplingRows
from pagemill_engine.scheduler.step import TokenLogprobs


class Sampled(NamedTuple):
    token_ids: NDArray[np.int64]
    """[rows]; meaningless where `finite` is false."""
    finite: NDArray[np.bool_]
    """False: the model's logits hold NaN or infinity."""
    logprobs: dict[int, TokenLogprobs]
    """By index into the batch, for rows that asked."""


def sample(
    logits: Tensor, sampling: SamplingRows, rows: NDArray[np.int64], num_generated: NDArray[np.int64]
) -> Sampled:
    """One token for each row of the batch.

    logits: float32 [batch, vocab] on any device, overwritten. rows: [batch], indices into `sampling`. num_generated:
    [batch], tokens that each row has generated before this one: the position in its random sequence.
    """
    best, token_ids = (found.cpu() for found in logits.max(-1))
    # A NaN anywhere makes the maximum NaN; -inf can only come from a broken forward pass as well, but harms nobody.
    finite = best.isfinite().numpy()
    if bool(sampling.plain[rows].all()):
        return Sampled(token_ids.numpy(), finite, {})

    logits = logits.cpu()
    wanting = np.flatnonzero((sampling.num_logprobs[rows] >= 0) & finite)
    raw_logits = logits[torch.from_numpy(wanting)] if len(wanting) else None
    changed = _process(logits, sampling, rows, num_generated)
    chosen = logits.argmax(-1).numpy() if changed else token_ids.numpy()
    drawn = np.flatnonzero((sampling.temperature[rows] > 0) & finite)
    if len(drawn):
        chosen = chosen.copy()
        chosen[drawn] = _draw(logits[torch.from_numpy(drawn)], sampling, rows[drawn], num_generated[drawn])
    logprobs: dict[int, TokenLogprobs] = {}
    if raw_logits is not None:
        reports = token_logprobs(raw_logits, chosen[wanting], sampling.num_logprobs[rows[wanting]])
        logprobs = dict(zip(wanting.tolist(), reports, strict=True))
    return Sampled(chosen, finite, logprobs)


def _process(logits: Tensor, sampling: SamplingRows, rows: NDArray[np.int64], num_generated: NDArray[np.int64]) -> bool:
    """Apply what rows ask for; False when nothing can have changed."""
    if not (sampling.logit_bias or sampling.stop_ids or sampling.penalised[rows].any()):
        return False
    processors.add_logit_bias(logits, sampling, rows)
    processors.mask_stops_until_min_tokens(logits, sampling, rows, num_generated)
    processors.apply_penalties(logits, sampling, rows)
    return True


def _draw(
    logits: Tensor, sampling: SamplingRows, rows: NDArray[np.int64], num_generated: NDArray[np.int64]
) -> NDArray[np.int64]:
    """A draw from softmax(logits / temperature) restricted by the rows' filters. logits is overwritten."""
    logits.sub_(logits.max(-1, keepdim=True).values).div_(torch.from_numpy(sampling.temperature[rows]).unsqueeze(1))
    filters.apply_min_p(logits, sampling.min_p[rows])
    filters.apply_top_k_top_p(logits, sampling.top_k[rows], sampling.top_p[rows])
    # The best token is at 0 now: only tokens within reach of it can win.
    at, token_ids = (index.numpy() for index in (logits > -randomness.REACH).nonzero(as_tuple=True))
    row_keys = randomness.keys(sampling.seeds[rows], sampling.choices[rows], num_generated)
    noisy = logits.numpy()[at, token_ids] + randomness.gumbel(row_keys[at], token_ids)
    return token_ids[_argmax_by_row(at, noisy, len(rows))]


def _argmax_by_row(at: NDArray[np.int64], values: NDArray[np.float32], num_rows: int) -> NDArray[np.int64]:
    """For values grouped by the sorted row numbers `at`, the index of each row's first maximum."""
    starts = np.searchsorted(at, np.arange(num_rows))
    best = np.maximum.reduceat(values, starts)
    winners = np.flatnonzero(values == best[at])
    return winners[np.searchsorted(at[winners], np.arange(num_rows))]
