"""The native write (`rope.native`) finds each head's place by itself; keys that do not turn have an angle of zero."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.rope import native


def plan_slots(slot_mapping: Tensor, num_heads: int, block_size: int) -> Tensor:
    """slot_mapping: int64 [tokens], block id * block_size + offset; returned as it is."""
    return slot_mapping.contiguous()


def store(heads: Tensor, num_heads: int, cache: Tensor, slots: Tensor) -> None:
    """Arguments as for `rope.native.rope_and_store`; all finite values stay as they are."""
    angles = (len(heads), 1, heads.shape[2] // 2)
    native.rope_and_store(heads, num_heads, torch.ones(angles), torch.zeros(angles), cache, slots)
