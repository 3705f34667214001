"""The formula."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x in place. x: [tokens, heads, head_dim]; cos, sin: [tokens, 1, head_dim / 2] of each token's position."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    x.copy_(rotated)
