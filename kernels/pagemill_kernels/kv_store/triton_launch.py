"""The write itself is part of `rope.triton_launch`, which finds each head's place by itself; keys that do not turn have
an angle of zero."""

from __future__ import annotations

from torch import Tensor

from pagemill_kernels.rope import triton_launch


def plan_slots(slot_mapping: Tensor, num_heads: int, block_size: int) -> Tensor:
    """slot_mapping: int64 [tokens], block id * block_size + offset; returned as it is."""
    return slot_mapping.contiguous()


def store(heads: Tensor, num_heads: int, cache: Tensor, slots: Tensor) -> None:
    """Arguments as for `rope.triton_launch.rope_and_store`; all finite values stay as they are."""
    angles = (len(heads), 1, heads.shape[2] // 2)
    cos, sin = heads.new_ones(angles), heads.new_zeros(angles)
    triton_launch.rope_and_store(heads, num_heads, cos, sin, cache, slots)
