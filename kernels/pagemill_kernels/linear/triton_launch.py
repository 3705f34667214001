"""Linear layers on a GPU: torch multiplies floats; Triton kernels multiply weights of 4 and 8 bits, dequantizing tiles.

For many rows, where each tile of rows would dequantize the same weights again, the weight is dequantized once, some of
its rows at a time, and torch multiplies. Packing moves the weight to the device; the caller drops its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from pagemill_kernels.arrays import Array
from pagemill_kernels.gather.triton_launch import gather_rows
from pagemill_kernels.gpu import launch
from pagemill_kernels.linear import triton_body
from pagemill_kernels.linear.groups import GROUP_SIZE, SMALL_GROUP_SIZE, GroupCodes
from pagemill_kernels.torch_arrays import to_torch

GATHER_BLOCK = 1024
RUNS_AT_ONCE = 64
"""Runs of a row that a program dequantizes."""
FLOATS_AT_ONCE = 1 << 25
"""Elements of a weight that are dequantized at a time: 64 MiB of bfloat16."""
MOST_ROWS_IN_TILES = {4: 128, 8: 256}
"""Rows, by bits of a weight, above which dequantizing once takes less time. Measured on an H100."""


class WeightParts(NamedTuple):
    """The kernels' arguments of a packed weight."""

    weight: Tensor
    """[out, in] floats, or quantized values in the layout of `triton_body`."""
    bias: Tensor | None
    scales: Tensor | None = None
    offsets: Tensor | None = None
    order: Tensor | None = None
    """int32 [in]: the input that each column multiplies."""
    bits: int = 0
    """Bits of a quantized value; 0: floats."""


class FloatLinear:
    can_gather = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def parts(self) -> WeightParts:
        return WeightParts(self._weight, self._bias)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add the result to `out`. The sum is part of the matmul: `out` is read and written once."""
        out.addmm_(x, self._weight.t())
        if self._bias is not None:
            out.add_(self._bias)

    def gather(self, ids: Tensor) -> Tensor:
        return gather_rows(self._weight, ids.reshape(-1)).view(*ids.shape, -1)


class Runs(NamedTuple):
    """Runs of inputs, each multiplied by one scale at a time."""

    size: int
    """Number of inputs of a run."""
    in_group: int
    """Number of runs that share a scale."""


def runs_of(group_size: int) -> Runs:
    return Runs(min(group_size, GROUP_SIZE), max(group_size // GROUP_SIZE, 1))


class Tiles(NamedTuple):
    block_m: int
    block_n: int
    runs: int
    num_warps: int
    num_stages: int


class CodesOnDevice:
    """Maps x, [..., in] of any float type, to [..., out] of x's type. Subclasses multiply."""

    can_gather = True
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype, device=x.device)
        self._multiply(x, out, accumulates=False)
        return out

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add x W^T + bias to `out` in place. out: contiguous [rows, out]."""
        self._multiply(x, out, accumulates=True)

    def _multiply(self, x: Tensor, out: Tensor, *, accumulates: bool) -> None:
        """Compute out = x W^T + bias, or add that to it. Raises `ValueError` for shapes that do not fit."""
        raise NotImplementedError


class CodesLinear(CodesOnDevice):
    """A linear layer over quantized weights, with sums in float32."""

    def __init__(self, weight: GroupCodes, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.codes.shape
        self._bits, self._runs = weight.bits, runs_of(weight.group_size)
        self._codes = _on_device(pack_nibbles(weight.codes) if weight.bits == 4 else weight.codes)
        self._scales = _on_device(weight.scales)
        self._offsets = None if weight.offsets is None else _on_device(weight.offsets)
        order = weight.input_order
        self._order = None if order is None else _on_device(order.astype(np.int32))
        self._bias = None if bias is None else launch.to_device(bias)

    @property
    def num_bytes(self) -> int:
        held = (self._codes, self._scales, self._offsets, self._order)
        return sum(each.nbytes for each in held if each is not None)

    def parts(self) -> WeightParts:
        return WeightParts(self._codes, self._bias, self._scales, self._offsets, self._order, self._bits)

    def gather(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, float32 [..., in]. ids: int64 [...], each below out_features."""
        layout = self.in_features, *self._runs, self._bits
        columns = gather_codes(ids, self._codes, self._scales, self._offsets, layout)
        return (
            columns if self._order is None else torch.empty_like(columns).index_copy_(-1, self._order.long(), columns)
        )

    def _multiply(self, x: Tensor, out: Tensor, *, accumulates: bool) -> None:
        launch.check_floats("linear", x=x, out=out)
        launch.check_contiguous("linear", out=out)
        if x.shape[-1] != self.in_features or x.stride(-1) != 1:
            raise ValueError(
                f"linear: x is {list(x.shape)} with strides {list(x.stride())}; rows of {self.in_features} "
                "neighbouring elements are needed"
            )
        launch.check_shape("linear", "out", out, (*x.shape[:-1], self.out_features))
        x = x.reshape(-1, self.in_features)
        if len(x) > MOST_ROWS_IN_TILES[self._bits] and out.dtype == x.dtype:
            self._multiply_floats(x, out.view(-1, self.out_features), accumulates=accumulates)
        elif len(x) > 0:
            self._multiply_codes(x, out, accumulates=accumulates)

    def _multiply_floats(self, x: Tensor, out: Tensor, *, accumulates: bool) -> None:
        if self._order is not None:
            x = x.index_select(1, self._order)
        step = max(1, FLOATS_AT_ONCE // self.in_features)
        floats = torch.empty(min(step, self.out_features), self.in_features, dtype=x.dtype, device=x.device)
        for first in range(0, self.out_features, step):
            columns = out[:, first : first + step]
            weight = floats[: columns.shape[1]]
            self._dequantize(first, weight)
            columns.addmm_(x, weight.t(), beta=1 if accumulates else 0)
        if self._bias is not None:
            out.add_(self._bias)

    def _dequantize(self, first: int, out: Tensor) -> None:
        """Dequantize rows of the weight from `first` on, in the order of the columns."""
        triton_body.dequantize[(len(out), triton.cdiv(self.in_features, self._runs.size * RUNS_AT_ONCE))](
            first=first,
            codes_ptr=self._codes,
            scales_ptr=self._scales,
            offsets_ptr=self._scales if self._offsets is None else self._offsets,
            out_ptr=out,
            IN=self.in_features,
            RUN=self._runs.size,
            RUNS_IN_GROUP=self._runs.in_group,
            BITS=self._bits,
            RUNS=RUNS_AT_ONCE,
            HAS_OFFSETS=self._offsets is not None,
            enable_fp_fusion=True,
            num_warps=4,
        )

    def _multiply_codes(self, x: Tensor, out: Tensor, *, accumulates: bool) -> None:
        tiles = choose_tiles(len(x), self._runs.size)
        grid = (triton.cdiv(len(x), tiles.block_m), triton.cdiv(self.out_features, tiles.block_n))
        triton_body.multiply_codes[grid](
            num_rows=len(x),
            x_ptr=x,
            x_stride=x.stride(0),
            codes_ptr=self._codes,
            scales_ptr=self._scales,
            offsets_ptr=self._scales if self._offsets is None else self._offsets,
            order_ptr=self._scales if self._order is None else self._order,
            bias_ptr=self._scales if self._bias is None else self._bias,
            out_ptr=out,
            OUT=self.out_features,
            IN=self.in_features,
            RUN=self._runs.size,
            RUNS_IN_GROUP=self._runs.in_group,
            BITS=self._bits,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            RUNS=tiles.runs,
            HAS_OFFSETS=self._offsets is not None,
            HAS_ORDER=self._order is not None,
            HAS_BIAS=self._bias is not None,
            ACCUMULATES=accumulates,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            enable_fp_fusion=True,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


def gather_codes(
    ids: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None, layout: tuple[int, int, int, int]
) -> Tensor:
    """Return rows of a quantized weight, float32 [..., in], in the order of the columns.

    ids: int64 [...]; layout: inputs, inputs of a run, runs of a group, bits of a value.
    """
    in_features, run_size, runs_in_group, bits = layout
    out = torch.empty(*ids.shape, in_features, dtype=torch.float32, device=codes.device)
    if ids.numel():
        triton_body.gather_codes[(ids.numel(), triton.cdiv(in_features, GATHER_BLOCK))](
            ids_ptr=ids.contiguous(),
            codes_ptr=codes,
            scales_ptr=scales,
            offsets_ptr=scales if offsets is None else offsets,
            out_ptr=out,
            IN=in_features,
            RUN=run_size,
            RUNS_IN_GROUP=runs_in_group,
            BITS=bits,
            BLOCK=GATHER_BLOCK,
            HAS_OFFSETS=offsets is not None,
            enable_fp_fusion=True,
            num_warps=4,
        )
    return out


def choose_tiles(num_rows: int, run_size: int) -> Tiles:
    """Choose tiles: narrow ones for few rows, so that many programs read the weight; large ones for many rows."""
    runs = 2 * GROUP_SIZE // run_size
    if num_rows <= 16:
        return Tiles(16, 32, 2 * runs, 4, 3)
    if num_rows <= 64:
        return Tiles(64, 64, runs, 4, 3)
    return Tiles(128, 64, runs, 8, 3)


def pack_linear(weight: Tensor, bias: Tensor | None) -> FloatLinear:
    """Pack a float weight. weight: [out, in]; bias: [out]."""
    launch.check_floats("linear", weight=weight)
    return FloatLinear(launch.to_device(weight), None if bias is None else launch.to_device(bias))


def pack_rows(table: Tensor) -> FloatLinear:
    """Pack a matrix of which only rows are read."""
    return pack_linear(table, None)


def pack_codes(weight: GroupCodes, bias: Tensor | None) -> CodesLinear:
    """Pack a quantized weight without dequantizing it. Raises ValueError for unsupported groups and floats."""
    in_features = weight.codes.shape[1]
    is_complete = weight.group_size % GROUP_SIZE == 0 or (weight.group_size, weight.bits) == (SMALL_GROUP_SIZE, 8)
    if in_features % GROUP_SIZE or not is_complete or weight.is_float or weight.table is not None:
        raise ValueError(
            f"linear: {weight.bits}-bit codes of {in_features} inputs in groups of {weight.group_size} as "
            f"{weight.codes.dtype} are not packed; integers in groups of multiples of {GROUP_SIZE} are, or of 16 for "
            "8-bit codes"
        )
    return CodesLinear(weight, bias)


def pack_nibbles(codes: Array) -> Array:
    """Pack uint8 [out, in] of 0 to 15 to uint8 [out, in / 2], in the order that `triton_body` reads."""
    halves = codes.reshape(len(codes), -1, 2, GROUP_SIZE // 2)
    packed: Array = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(codes), -1)
    return packed


def _on_device(array: Array) -> Tensor:
    return launch.to_device(to_torch(np.ascontiguousarray(array)))
