"""`rows.TokenCounts` as tensors of a torch device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pagemill_kernels.gpu.launch import upload


class DeviceCounts:
    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        shape = (max_rows, vocab_size)
        self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        self.in_output = torch.zeros(shape, dtype=torch.int32, device=device)

    def reset(self, row: int, prompt: list[int], output: list[int]) -> None:
        device, vocab_size = self.in_prompt.device, self.in_prompt.shape[1]
        self.in_prompt[row].zero_().index_fill_(0, upload(np.array(prompt, dtype=np.int64), device), True)
        counts = np.bincount(np.array(output, dtype=np.int64), minlength=vocab_size)
        self.in_output[row].copy_(upload(counts, device, torch.int32))


def counts_on(device: torch.device) -> Callable[[int, int], DeviceCounts]:
    """Return a function for `SamplingRows.make_counts`."""
    return lambda max_rows, vocab_size: DeviceCounts(max_rows, vocab_size, device)
