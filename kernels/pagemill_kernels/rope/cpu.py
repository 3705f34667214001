"""Rotation with torch in place, with two temporaries of half a head each, then one indexed write.

Shapes are those of `reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.kv_store.reference import store_kv


def rope_and_store(heads: Tensor, num_heads: int, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> None:
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    apply_rope(heads[:, : num_heads + num_kv_heads], cos, sin)
    store_kv(heads[:, num_heads:], cache, slots)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    first_sin = torch.mul(first, sin)
    second_sin = torch.mul(second, sin)
    first.mul_(cos).sub_(second_sin)
    second.mul_(cos).add_(first_sin)
