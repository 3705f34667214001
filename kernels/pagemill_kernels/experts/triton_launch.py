"""All experts of a layer in two grouped matmuls, over floats or quantized weights.

The host never waits for the device: only the device knows how many rows an expert gets, so the grid has one more block
per expert than the rows fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pagemill_kernels.activation.triton_launch import silu_and_mul
from pagemill_kernels.adapters.rows import ExpertRows
from pagemill_kernels.experts import triton_body
from pagemill_kernels.experts.parts import ExpertParts, Gate
from pagemill_kernels.experts.reference import activated_by
from pagemill_kernels.gpu import launch
from pagemill_kernels.linear.packed import PackedLinear
from pagemill_kernels.linear.triton_launch import CodesLinear, FloatLinear, Runs, WeightParts, runs_of

SUM_BLOCK = 1024


class _Rows(NamedTuple):
    """A step's slots sorted by expert, and the first slot and the first block of each expert."""

    slots: Tensor
    starts: Tensor
    blocks: Tensor
    block_m: int
    num_blocks: int


class GroupedExperts:
    """Experts whose weights are stacked in one tensor each, [experts, out, in]."""

    def __init__(self, experts: Sequence[ExpertParts], gate: Gate) -> None:
        self._num_experts, self._gate = len(experts), gate
        up, down = _stacked([each.up for each in experts]), _stacked([each.down for each in experts])
        self._weights = up, down
        self._up_weight, self._up_scales, self._up_offsets = up.weight, up.scales, up.offsets
        self._down_weight, self._down_scales, self._down_offsets = down.weight, down.scales, down.offsets
        self._edges = torch.arange(self._num_experts + 1, device=up.weight.device)

    @property
    def num_bytes(self) -> int:
        held = ((parts.weight, parts.scales, parts.offsets, parts.order) for parts in self._weights)
        tensors = (each for parts in held for each in parts)
        return sum(each.nbytes for each in tensors if each is not None)

    def add_to(self, out: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, rows: ExpertRows | None = None) -> None:
        launch.check_floats("experts", out=out, x=x)
        launch.check_contiguous("experts", out=out, x=x)
        num_tokens, top_k = chosen.shape
        if num_tokens == 0:
            return
        sorted_rows = self._sort(chosen)
        gate_up = _multiply(self._weights[0], x, sorted_rows, self._num_experts, top_k)
        if rows is not None:
            tokens = torch.arange(num_tokens, device=x.device).repeat_interleave(top_k)
            rows.add_up(gate_up, x[tokens], chosen.flatten(), tokens)
        inner = silu_and_mul(gate_up) if self._gate == Gate("silu") else activated_by(self._gate, gate_up)
        results = _multiply(self._weights[1], inner, sorted_rows, self._num_experts, 1)
        if rows is not None:
            rows.add_down(results, inner, chosen.flatten(), tokens)
        size = out.shape[1]
        triton_body.add_weighted[(num_tokens, triton.cdiv(size, SUM_BLOCK))](
            results_ptr=results,
            weights_ptr=weights.contiguous(),
            out_ptr=out,
            SIZE=size,
            TOP_K=top_k,
            BLOCK=SUM_BLOCK,
            enable_fp_fusion=True,
            num_warps=4,
        )

    def _sort(self, chosen: Tensor) -> _Rows:
        num_slots = chosen.numel()
        block_m = 16 if num_slots <= 16 * self._num_experts else 64
        experts, slots = chosen.flatten().sort(stable=True)
        starts = torch.searchsorted(experts, self._edges)
        counts = (starts.diff() + (block_m - 1)) // block_m
        blocks = torch.cat([starts[:1], counts.cumsum(0)])
        num_blocks = min(num_slots, self._num_experts) + num_slots // block_m
        return _Rows(slots, starts.to(torch.int32), blocks.to(torch.int32), block_m, num_blocks)


def pack_experts(experts: Sequence[ExpertParts], gate: Gate) -> GroupedExperts:
    """Pack a copy of the weights; the caller drops its own."""
    return GroupedExperts(experts, gate)


def _multiply(weight: WeightParts, x: Tensor, rows: _Rows, num_experts: int, divisor: int) -> Tensor:
    """Return [slots, out] of the rows slot

    divisor of x.
    """
    in_features = x.shape[1]
    out_features = weight.weight.shape[1]
    runs = Runs(1, 1) if weight.scales is None else runs_of(in_features // weight.scales.shape[2])
    out = torch.empty(len(rows.slots), out_features, dtype=x.dtype, device=x.device)
    block_n = 32 if rows.block_m == 16 else 64
    triton_body.multiply_experts[(rows.num_blocks, triton.cdiv(out_features, block_n))](
        x_ptr=x,
        slots_ptr=rows.slots,
        starts_ptr=rows.starts,
        blocks_ptr=rows.blocks,
        weight_ptr=weight.weight,
        scales_ptr=weight.weight if weight.scales is None else weight.scales,
        offsets_ptr=weight.weight if weight.offsets is None else weight.offsets,
        order_ptr=weight.weight if weight.order is None else weight.order,
        bias_ptr=weight.weight if weight.bias is None else weight.bias,
        out_ptr=out,
        NUM_EXPERTS=num_experts,
        PADDED_EXPERTS=triton.next_power_of_2(num_experts),
        DIVISOR=divisor,
        OUT=out_features,
        IN=in_features,
        RUN=runs.size,
        RUNS_IN_GROUP=runs.in_group,
        BITS=weight.bits,
        BLOCK_M=rows.block_m,
        BLOCK_N=block_n,
        BLOCK_K=64,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_ORDER=weight.order is not None,
        HAS_BIAS=weight.bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        enable_fp_fusion=True,
        num_warps=4,
        num_stages=3,
    )
    return out


def _stacked(linears: Sequence[PackedLinear]) -> WeightParts:
    parts = [each.parts() for each in linears if isinstance(each, FloatLinear | CodesLinear)]
    if len(parts) != len(linears) or len({each.bits for each in parts}) > 1:
        kinds = ", ".join(sorted({type(each).__name__ for each in linears}))
        raise TypeError(f"experts: {kinds} are not multiplied together; floats or codes of one width are")
    return WeightParts(
        torch.stack([each.weight for each in parts]),
        _stack([each.bias for each in parts]),
        _stack([each.scales for each in parts]),
        _stack([each.offsets for each in parts]),
        _stack_orders([each.order for each in parts], parts[0].weight),
        parts[0].bits,
    )


def _stack_orders(orders: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    """Return an order for every expert if one has an order, or None."""
    size = next((len(each) for each in orders if each is not None), None)
    if size is None:
        return None
    plain = torch.arange(size, dtype=torch.int32, device=like.device)
    return torch.stack([plain if each is None else each for each in orders])


def _stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [each for each in tensors if each is not None]
    return torch.stack(there) if there else None
