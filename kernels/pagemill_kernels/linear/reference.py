"""The formula, over the weight as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def pack_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """weight: [out, in]; bias: [out]. Returns a function of x: [tokens, in] -> [tokens, out]."""
    return lambda x: F.linear(x, weight, bias)
