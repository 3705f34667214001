"""Linear layers over bfloat16 weights in oneDNN's blocked layout, between float32 activations: AVX512_BF16 and AMX.

Pagemill's panels (`linear.native`) compute in float32; on a processor that multiplies bfloat16 in hardware oneDNN is
several times as fast at many rows. Rows and results are rounded to bfloat16, sums are float32. Whether it is used is
decided before anything loads (`unit`, called by `registry.cpu_backend`): there is no fallback later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.linear import cpu

EXACT_ROWS = 16
"""Up to here each number of rows has its own primitive, which oneDNN creates at first use in about a millisecond."""
_STEPS = ((256, 16), (1 << 62, 64))
"""(Rows up to, rounded up to a multiple of): prompts of all lengths share a few dozen primitives.

Sixteen rows are a tile of AMX, so added rows rarely cost anything.
"""


class OneDNNLinear:
    """Maps x, float32 or bfloat16 [tokens, in], to bfloat16 [tokens, out]."""

    can_gather = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack a weight. weight: bfloat16 [out, in]; bias: [out] of any float type."""
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"linear: weights of {weight.dtype} are not packed for bfloat16 products; bfloat16 are")
        self.in_features = weight.shape[1]
        self._product = cpu.pack_linear(weight, None if bias is None else bias.to(torch.bfloat16))

    @property
    def num_bytes(self) -> int:
        return self._product.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = len(x)
        computed = num_computed_rows(num_rows)
        if computed == num_rows:
            return self._product(x.to(torch.bfloat16))
        padded = torch.empty(computed, self.in_features, dtype=torch.bfloat16)
        padded[:num_rows] = x
        padded[num_rows:] = 0
        return self._product(padded)[:num_rows]

    def add_to(self, out: Tensor, x: Tensor) -> None:
        out.add_(self(x))

    def gather(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("oneDNN's blocked layout is opaque")


def pack_linear(weight: Tensor, bias: Tensor | None) -> OneDNNLinear:
    """Pack a weight, which is not kept. weight: bfloat16 [out, in]; bias: [out]."""
    return OneDNNLinear(weight, bias)


def num_computed_rows(num_rows: int) -> int:
    """Return the padded number of rows with which `num_rows` are computed."""
    if num_rows <= EXACT_ROWS:
        return num_rows
    step = next(step for limit, step in _STEPS if num_rows <= limit)
    return -(-num_rows // step) * step


def unit() -> str | None:
    """Return the unit with which oneDNN multiplies bfloat16 on this processor, or None."""
    if not cpu.can_pack(torch.bfloat16):
        return None
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512_BF16" if torch.cpu._is_avx512_bf16_supported() else None
