"""Launches adapters' additions: two launches for each product, whatever the number of adapters in the batch.

All slots of a linear layer are in two tensors, ranks padded to the largest; rows without an adapter do nothing. The
launches depend on no value of the host, so that a CUDA graph may contain them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pagemill_kernels.adapters import triton_body
from pagemill_kernels.adapters.reference import AdapterMatrices

BLOCK_IN, BLOCK_OUT = 128, 64


class AdapterStack(NamedTuple):
    """The matrices of all slots for one linear layer, or for the same matrix of all experts of a layer."""

    a: Tensor
    """[slots * experts, rank, in]; rank: a power of two from 16 on, padded with zeros."""
    b: Tensor
    """[slots * experts, out, rank], multiplied by the adapters' scales."""
    experts: int = 1


class TritonAdapterRows:
    """The adapters of a step's rows, on the device."""

    def __init__(self, slots: Tensor, stacks: Mapping[int, AdapterStack]) -> None:
        """`slots`: int64 [rows], of each row's adapter, or -1. `stacks`: by the number of a linear layer, of
        experts by that of the first; layers that are not there get nothing."""
        self._slots, self._stacks = slots, stacks

    def at(self, rows: Tensor) -> TritonAdapterRows:
        """Return the adapters of some of the rows."""
        return TritonAdapterRows(self._slots[rows], self._stacks)

    def add_to(self, number: int, out: Tensor, x: Tensor) -> None:
        """Compute `reference.PlainAdapterRows.add_to`."""
        if (stack := self._stacks.get(number)) is not None:
            _add(stack, self._slots, out, x)

    def add_to_many(self, first: int, experts: Tensor, out: Tensor, x: Tensor, rows: Tensor) -> None:
        """Compute `reference.PlainAdapterRows.add_to_many`."""
        if (stack := self._stacks.get(first)) is not None:
            slots = self._slots[rows]
            _add(stack, torch.where(slots >= 0, slots * stack.experts + experts, -1), out, x)

    def add_rows(self, number: int, out: Tensor, ids: Tensor) -> None:
        """Compute `reference.PlainAdapterRows.add_rows`: A's columns are gathered, B is multiplied as elsewhere."""
        stack = self._stacks.get(number)
        if stack is None:
            return
        has = (self._slots >= 0) & (ids >= 0)
        index = torch.where(has, self._slots, -1)
        sums = stack.a[index.clamp(min=0), :, ids.clamp(min=0)].float().contiguous()
        _expand(stack, index, sums, out)

    def matrices(self, number: int) -> Iterator[tuple[Tensor, AdapterMatrices]]:
        """Compute `reference.PlainAdapterRows.matrices`. It reads the slots on the host: no graph may contain it."""
        if (stack := self._stacks.get(number)) is None:
            return
        for slot in torch.unique(self._slots[self._slots >= 0]).tolist():
            found = torch.nonzero(self._slots == slot)[:, 0]
            yield found, AdapterMatrices(stack.a[slot], stack.b[slot])


def empty_stack(
    slots: int, experts: int, rank: int, ins: int, outs: int, dtype: torch.dtype, device: torch.device
) -> AdapterStack:
    """Return slots of zeros for adapters up to a rank."""
    rank = max(16, triton.next_power_of_2(rank))
    a = torch.zeros(slots * experts, rank, ins, dtype=dtype, device=device)
    return AdapterStack(a, torch.zeros(slots * experts, outs, rank, dtype=dtype, device=device), experts)


def stacked(matrices: list[AdapterMatrices | None], experts: int = 1) -> AdapterStack:
    """Stack the matrices of slots, or of slots and experts in turn; None: nothing is added. At least one is there."""
    some = [each for each in matrices if each is not None]
    (_, ins), outs = some[0].a.shape, len(some[0].b)
    rank, like = max(len(each.a) for each in some), some[0].a
    stack = empty_stack(len(matrices) // experts, experts, rank, ins, outs, like.dtype, like.device)
    for index, each in enumerate(matrices):
        if each is not None:
            stack.a[index, : len(each.a)] = each.a
            stack.b[index, :, : len(each.a)] = each.b
    return stack


def _add(stack: AdapterStack, index: Tensor, out: Tensor, x: Tensor) -> None:
    if len(x) == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    rank, ins = stack.a.shape[1:]
    sums = torch.empty(len(x), rank, dtype=torch.float32, device=x.device)
    triton_body.shrink[(len(x),)](
        x_ptr=x,
        x_stride=x.stride(0),
        index_ptr=index,
        a_ptr=stack.a,
        sums_ptr=sums,
        IN=ins,
        RANK=rank,
        BLOCK=BLOCK_IN,
        enable_fp_fusion=True,
        num_warps=4,
    )
    _expand(stack, index, sums, out)


def _expand(stack: AdapterStack, index: Tensor, sums: Tensor, out: Tensor) -> None:
    if len(out) == 0:
        return
    outs, rank = stack.b.shape[1:]
    triton_body.expand[(len(out), triton.cdiv(outs, BLOCK_OUT))](
        sums_ptr=sums,
        index_ptr=index,
        b_ptr=stack.b,
        out_ptr=out,
        out_stride=out.stride(0),
        OUT=outs,
        RANK=rank,
        BLOCK=BLOCK_OUT,
        enable_fp_fusion=True,
        num_warps=4,
    )
