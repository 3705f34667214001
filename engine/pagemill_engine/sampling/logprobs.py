"""Log probabilities of the model itself: log-softmax of the logits before any bias, penalty or temperature."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_engine.scheduler.step import TokenLogprobs


def token_logprobs(raw_logits: Tensor, token_ids: NDArray[np.int64], num_top: NDArray[np.int64]) -> list[TokenLogprobs]:
    """The chosen token first, then the row's `num_top` most likely ones. raw_logits: [rows, vocab]."""
    logprobs = raw_logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.from_numpy(token_ids).unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1).add_(1).tolist()
    values, indices = logprobs.topk(max(int(num_top.max()), 1), dim=-1)
    rows = zip(
        token_ids.tolist(),
        chosen.squeeze(1).tolist(),
        indices.tolist(),
        values.tolist(),
        num_top.tolist(),
        ranks,
        strict=True,
    )
    return [
        TokenLogprobs([token_id, *top_ids[:k]], [logprob, *top_values[:k]], rank)
        for token_id, logprob, top_ids, top_values, k, rank in rows
    ]
