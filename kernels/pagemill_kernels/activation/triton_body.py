"""Triton kernel of act(gate) * up over a fused projection; float32 arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_and_mul(
    gate_up_ptr,
    gate_up_stride,
    out_ptr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """Compute a piece of one token's [gate, up]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HALF
    at = gate_up_ptr + token * gate_up_stride + column
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if IS_GELU:
        # x * (1 + tanh(t)) / 2 = x * sigmoid(2t), t = sqrt(2 / pi) * (x + 0.044715 x^3)
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    tl.store(out_ptr + token * HALF + column, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)
