"""Rotation in place with two temporaries of half a head each."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x in place. x: [tokens, heads, head_dim]; cos, sin: [tokens, 1, head_dim / 2] of each token's position."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    first_sin = torch.mul(first, sin)
    second_sin = torch.mul(second, sin)
    first.mul_(cos).sub_(second_sin)
    second.mul_(cos).add_(first_sin)
