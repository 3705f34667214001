"""The write itself is part of `rope.triton_launch`, which finds each head's place by itself."""

from __future__ import annotations

from torch import Tensor


def plan_slots(slot_mapping: Tensor, num_heads: int, block_size: int) -> Tensor:
    """slot_mapping: int64 [tokens], block id * block_size + offset; returned as it is."""
    return slot_mapping.contiguous()
