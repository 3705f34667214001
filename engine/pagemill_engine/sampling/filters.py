"""Restricts the candidates of sampled rows: min_p, top_k, then top_p over what top_k left. Excluded logits become -inf.

A full sort of the vocabulary is the costliest thing a sampler can do, so the cut is searched among the best
`SHORTLIST` tokens first; only rows whose cut lies further down are sorted whole.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SHORTLIST = 1024


def apply_min_p(logits: Tensor, min_p: NDArray[np.float32]) -> None:
    """Drop tokens less likely than min_p times the most likely one. logits: [rows, vocab], already scaled."""
    chosen = torch.from_numpy(np.flatnonzero(min_p > 0))
    if len(chosen) == 0:
        return
    picked = logits[chosen]
    floor = picked.max(dim=-1, keepdim=True).values + torch.from_numpy(min_p)[chosen].log().unsqueeze(1)
    logits[chosen] = picked.masked_fill(picked < floor, float("-inf"))


def apply_top_k_top_p(logits: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> None:
    """Keep the top_k most likely tokens, and of these the smallest set with probability top_p. At least one stays."""
    vocab_size = logits.shape[1]
    pending = np.flatnonzero((top_k < vocab_size) | (top_p < 1.0))
    for width in (min(SHORTLIST, vocab_size), vocab_size):
        if len(pending) == 0:
            return
        at = torch.from_numpy(pending)
        picked = logits[at]
        values, token_ids = picked.topk(width, dim=-1)
        keep, decided = _keep(picked, values, torch.from_numpy(top_k[pending]), torch.from_numpy(top_p[pending]))
        kept = torch.full_like(picked, float("-inf"))
        kept.scatter_(1, token_ids, values.masked_fill(~keep, float("-inf")))
        logits[at[decided]] = kept[decided]
        pending = pending[~decided.numpy()]


def _keep(logits: Tensor, values: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """For the `width` best values, in falling order: which stay; and for which rows the cut lies among them."""
    width, vocab_size = values.shape[1], logits.shape[1]
    inside_k = torch.arange(width) < top_k.unsqueeze(1)
    cut_by_k = top_k <= width
    # The mass that top_p is measured against: the best top_k tokens where top_k cuts, else everything.
    inside = values.masked_fill(~inside_k, float("-inf"))
    total = torch.where(cut_by_k, inside.logsumexp(-1), logits.logsumexp(-1))
    probabilities = (inside - total.unsqueeze(1)).exp()
    mass_before = probabilities.cumsum(-1) - probabilities
    keep = inside_k & ((mass_before < top_p.unsqueeze(1)) | (top_p.unsqueeze(1) >= 1.0))
    keep[:, 0] = True
    cut_by_p = (top_p < 1.0) & (~keep[:, -1]) & (top_k >= vocab_size)
    return keep, cut_by_k | cut_by_p | torch.tensor(width == vocab_size)
