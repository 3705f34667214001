"""Changes to logits that a request asks for, in place: bias, minimum length, penalties. Order as in `sampler`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_engine.sampling.rows import SamplingRows


def add_logit_bias(logits: Tensor, sampling: SamplingRows, rows: NDArray[np.int64]) -> None:
    for i in _positions(rows, sampling.logit_bias):
        token_ids, biases = sampling.logit_bias[int(rows[i])]
        logits[i, token_ids] += torch.tensor(biases)


def mask_stops_until_min_tokens(
    logits: Tensor, sampling: SamplingRows, rows: NDArray[np.int64], num_generated: NDArray[np.int64]
) -> None:
    """No end before `min_tokens` tokens were generated."""
    for i in _positions(rows, sampling.stop_ids):
        row = int(rows[i])
        if num_generated[i] < sampling.min_tokens[row]:
            logits[i, sampling.stop_ids[row]] = float("-inf")


def apply_penalties(logits: Tensor, sampling: SamplingRows, rows: NDArray[np.int64]) -> None:
    """Repetition over prompt and output (CTRL, arXiv 1909.05858), then frequency and presence over the output."""
    chosen = np.flatnonzero(sampling.penalised[rows])
    if len(chosen) == 0 or sampling.counts is None:
        return
    at, of = torch.from_numpy(chosen), torch.from_numpy(rows[chosen])
    picked = logits[at]
    counts = sampling.counts.in_output[of]
    repetition = _column(sampling.repetition_penalty[rows[chosen]])
    seen = sampling.counts.in_prompt[of] | (counts > 0)
    repeated = torch.where(picked > 0, picked / repetition, picked * repetition)
    picked = torch.where(seen, repeated, picked)
    picked -= _column(sampling.frequency_penalty[rows[chosen]]) * counts
    picked -= _column(sampling.presence_penalty[rows[chosen]]) * (counts > 0)
    logits[at] = picked


def _positions(rows: NDArray[np.int64], owners: Mapping[int, object]) -> list[int]:
    """Indices of the batch whose row has an entry; most batches have none."""
    return [i for i, row in enumerate(rows.tolist()) if row in owners] if owners else []


def _column(values: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(values).unsqueeze(1)
