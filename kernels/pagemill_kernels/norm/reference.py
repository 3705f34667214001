"""The formulas of norms, in float32 whatever the input's type."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x, [..., hidden]; weight: [hidden], of x's type or float32. Returns x's shape and type."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(x.dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise x around its mean; bias: [hidden]. Other arguments: as for `rms_norm`."""
    wide = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), wide, eps).to(x.dtype)
