"""Linear layers over weights in native panels: float32, bfloat16, or quantized to 4 and 8 bits; float32 arithmetic.

Compared with oneDNN on two Zen 3 cores: 4 to 5 times faster at one row with 4-bit weights (a sixth of the memory), 1.3
times at 64 rows and more. The packed weight replaces the plain one.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array, address, optional_address
from pagemill_kernels.cpu import launch, library, processor
from pagemill_kernels.huge_pages import empty_weights
from pagemill_kernels.linear.groups import GROUP_SIZE, SMALL_GROUP_SIZE, CodeBlocks, GroupCodes

BFLOAT16_ROWS = 9
"""Rows from which on bfloat16 matmuls with quantized weights are faster than integer ones.

If the weights are quantized to floats, they are compared with float32 matmuls. Processors that multiply integers or
float32 faster never use bfloat16 here.
"""


FLOAT32_ROWS = 24
"""Rows from which on bfloat16 weights are multiplied in float32, on processors that do that faster.

Fewer rows are limited by reading the weights, or by converting them.
"""


class _Packed(NamedTuple):
    """A weight in the layout of cpu/src/linear.cpp."""

    shape: tuple[int, int]
    format: int
    codes: Array
    scales: Array | None = None
    group_size: int = GROUP_SIZE
    has_offsets: bool = False
    bfloat16_rows: int = 0
    float32_rows: int = 0
    input_order: Array | None = None
    """int32 [in]: the input that each column multiplies."""
    table: Array | None = None
    """float32 [16]: the values of 4-bit indices."""


class NativeLinear:
    """Maps x, float32 [..., in], to [..., out], in float32 arithmetic over any stored form of the weight."""

    def __init__(self, weight: _Packed, bias: Array | None) -> None:
        self.out_features, self.in_features = weight.shape
        codes, scales = weight.codes, weight.scales
        self._codes, self._scales, self.input_order, self._table = codes, scales, weight.input_order, weight.table
        self._bias = None if bias is None else np.ascontiguousarray(arrays.widened(bias))
        self._weight = library.PackedWeight(
            format=weight.format,
            group=weight.group_size,
            has_offsets=weight.has_offsets,
            bfloat16_rows=weight.bfloat16_rows,
            float32_rows=weight.float32_rows,
            out_features=self.out_features,
            in_features=self.in_features,
            codes=address(codes),
            scales=optional_address(scales),
            input_order=optional_address(weight.input_order),
            table=optional_address(weight.table),
        )
        self.address = ctypes.addressof(self._weight)
        """Address of the C struct; valid as long as this object lives."""
        self.bias_address = optional_address(self._bias)
        self._pointer = ctypes.byref(self._weight)
        self._linear = launch.native().pagemill_linear

    @property
    def num_bytes(self) -> int:
        parts = (self._codes, self._scales, self.input_order, self._table)
        return sum(each.nbytes for each in parts if each is not None)

    def __call__(self, x: Array) -> Array:
        out = arrays.empty((*x.shape[:-1], self.out_features))
        self._run(launch.rows(x), out, accumulate=0)
        return out

    def write(self, x: Array, out: Array) -> None:
        """Fill `out` with x W^T + bias. out: float32 [rows, out], whose rows may be apart."""
        self.check(x.shape, x.dtype, x.dtype == np.float32)
        self._multiply(address(x), len(x), launch.row_stride(x), address(out), launch.row_stride(out), 0)

    def add_to(self, out: Array, x: Array) -> None:
        """Add x W^T + bias to `out` in place. out: contiguous float32 [rows, out]."""
        self._run(launch.rows(x), out, accumulate=1)

    def gather(self, ids: Array) -> Array:
        """Return rows of the weight, float32 [..., in]. ids: int64 [...], each below out_features."""
        flat = np.ascontiguousarray(ids.reshape(-1))
        out = arrays.empty((len(flat), self.in_features))
        launch.native().pagemill_gather_rows(self._pointer, address(flat), len(flat), address(out))
        if self.input_order is not None:
            stored = out
            out = np.empty_like(stored)
            out[:, self.input_order] = stored
        return out.reshape(*ids.shape, self.in_features)

    def multiply(self, x: int, num_rows: int, stride: int, out: int, accumulate: int) -> None:
        """Multiply by addresses: x of float32 [num_rows, in] with rows `stride` values apart, out of [num_rows,
        out]."""
        self._multiply(x, num_rows, stride, out, self.out_features, accumulate)

    def _multiply(self, x: int, num_rows: int, stride: int, out: int, out_stride: int, accumulate: int) -> None:
        self._linear(
            self._pointer, x, num_rows, stride, self.bias_address, out, out_stride, accumulate, launch.num_threads()
        )

    def check(self, shape: tuple[int, ...], dtype: object, is_float32: bool) -> None:
        """Raise ValueError unless rows of this shape and type can be multiplied."""
        if shape[1] != self.in_features or not is_float32:
            raise ValueError(f"linear: x is {dtype} {list(shape)}, float32 [rows, {self.in_features}] is needed")

    def _run(self, x: Array, out: Array, accumulate: int) -> None:
        self.check(x.shape, x.dtype, x.dtype == np.float32)
        self.multiply(address(x), len(x), launch.row_stride(x), address(out), accumulate)


def pack_linear(weight: Array, bias: Array | None) -> NativeLinear:
    """Pack a weight. weight: float32 or bfloat16 [out, in]; bias: [out]."""
    if weight.dtype not in (np.float32, np.uint16):
        raise ValueError(f"linear: weights of {weight.dtype} are not packed; float32 or bfloat16 (uint16) are")
    out_features, in_features = weight.shape
    weight = np.ascontiguousarray(weight)
    packed = empty_weights(_panels(out_features) * in_features * library.PANEL, weight.dtype)
    launch.native().pagemill_pack_plain(
        address(weight), out_features, in_features, weight.itemsize, address(packed), launch.num_threads()
    )
    format = library.FORMAT_FLOAT32 if weight.dtype == np.float32 else library.FORMAT_BFLOAT16
    return NativeLinear(_Packed((out_features, in_features), format, packed), bias)


def pack_codes(weight: GroupCodes, bias: Array | None) -> NativeLinear:
    """Pack a quantized weight without dequantizing it.

    With the scales of groups of 32 a weight takes 6 bits (4-bit values) or 9 (8-bit values); with groups of 128 it
    takes 4.5 and 8.25. 4-bit floats have no offsets and take 5 bits with groups of 32.
    """
    return _pack_codes(weight, bias, _floats_format(weight) or _integers_format(weight.bits))


def pack_pairs(weight: Array, bias: Array | None) -> NativeLinear:
    """Pack a bfloat16 weight for bfloat16 matmuls; without `library.has_bfloat16`, as `pack_linear`."""
    if weight.dtype != np.uint16 or not library.has_bfloat16():
        return pack_linear(weight, bias)
    out_features, in_features = weight.shape
    weight = np.ascontiguousarray(weight)
    packed = empty_weights(_panels(out_features) * -(-in_features // 2) * 2 * library.PANEL, weight.dtype)
    launch.native().pagemill_pack_pairs(
        address(weight), out_features, in_features, address(packed), launch.num_threads()
    )
    rows = FLOAT32_ROWS if processor.multiplies_floats_faster() else 0
    return NativeLinear(_Packed((out_features, in_features), library.FORMAT_PAIRS, packed, float32_rows=rows), bias)


def pack_codes_for_bfloat16(weight: GroupCodes, bias: Array | None) -> NativeLinear:
    """Pack like `pack_codes_for_dots`, also 8-bit values; many rows are multiplied in bfloat16.

    Without bfloat16 matmuls on this processor, as `pack_codes_for_dots`.
    """
    if not library.has_bfloat16():
        return pack_codes_for_dots(weight, bias)
    floats = _floats_format(weight)
    rows = _floats_rows() if floats else _dots_rows()
    return _pack_codes(weight, bias, floats or _dots_format(weight.bits), rows)


def pack_codes_for_dots(weight: GroupCodes, bias: Array | None) -> NativeLinear:
    """Pack 4-bit integers for integer matmuls: activations are rounded to 16 bits in groups of 32.

    Without integer matmuls on this processor, the arithmetic stays float32.
    """
    if weight.bits != 4 or weight.table is not None or not library.has_dots():
        return pack_codes(weight, bias)
    return _pack_codes(weight, bias, library.FORMAT_DOTS4)


def _floats_format(weight: GroupCodes) -> int | None:
    """Return the format of quantized floats; None for integers."""
    if weight.table is not None:
        return library.FORMAT_FLOATS4
    return library.FORMAT_FLOATS8 if weight.is_float else None


def _integers_format(bits: int) -> int:
    return library.FORMAT_CODES4 if bits == 4 else library.FORMAT_CODES8


def _pack_codes(weight: GroupCodes, bias: Array | None, format: int, bfloat16_rows: int = 0) -> NativeLinear:
    out_features, in_features = weight.codes.shape
    has_offsets = weight.offsets is not None
    is_complete = weight.group_size % GROUP_SIZE == 0 or (weight.group_size, weight.bits) == (SMALL_GROUP_SIZE, 8)
    needs_offsets = weight.bits == 4 and weight.table is None
    if in_features % GROUP_SIZE or not is_complete or (needs_offsets and not has_offsets):
        raise ValueError(
            f"linear: {weight.bits}-bit codes of {in_features} inputs in groups of {weight.group_size} are not packed; "
            f"groups of multiples of {GROUP_SIZE} are, or of 16 for 8-bit codes, and integers of 4 bits need offsets"
        )
    codes, scales = np.ascontiguousarray(weight.codes), np.ascontiguousarray(weight.scales)
    offsets = None if weight.offsets is None else np.ascontiguousarray(weight.offsets)
    num_weights = _panels(out_features) * library.PANEL * in_features
    packed = empty_weights(num_weights * weight.bits // 8, np.uint8)
    packed_scales = empty_weights(num_weights // weight.group_size * (1 + has_offsets))
    launch.native().pagemill_pack_codes(
        address(codes),
        address(scales),
        optional_address(offsets),
        out_features,
        in_features,
        format,
        weight.group_size,
        address(packed),
        address(packed_scales),
        launch.num_threads(),
    )
    shape = (out_features, in_features)
    order = None if weight.input_order is None else weight.input_order.astype(np.int32)
    table = None if weight.table is None else np.ascontiguousarray(weight.table)
    stored = _Packed(shape, format, packed, packed_scales, weight.group_size, has_offsets, bfloat16_rows)
    parts = stored._replace(input_order=order, table=table)
    return NativeLinear(parts, bias)


def pack_blocks(weight: CodeBlocks, bias: Array | None) -> NativeLinear:
    """Pack a weight's stored blocks like `pack_codes`, in less than half its time."""
    return _pack_blocks(weight, bias, _integers_format(weight.bits))


def pack_blocks_for_dots(weight: CodeBlocks, bias: Array | None) -> NativeLinear:
    """Pack a weight's stored blocks like `pack_codes_for_dots`."""
    if weight.bits != 4 or not library.has_dots():
        return pack_blocks(weight, bias)
    return _pack_blocks(weight, bias, library.FORMAT_DOTS4)


def pack_blocks_for_bfloat16(weight: CodeBlocks, bias: Array | None) -> NativeLinear:
    """Pack a weight's stored blocks like `pack_codes_for_bfloat16`."""
    if not library.has_bfloat16():
        return pack_blocks_for_dots(weight, bias)
    return _pack_blocks(weight, bias, _dots_format(weight.bits), _dots_rows())


def _dots_rows() -> int:
    """Return the number of rows from which on integer formats are multiplied in bfloat16; 0: never."""
    return 0 if processor.multiplies_integers_faster() else BFLOAT16_ROWS


def _floats_rows() -> int:
    """Return the number of rows from which on quantized floats are multiplied in bfloat16; 0: never."""
    return 0 if processor.multiplies_floats_faster() else BFLOAT16_ROWS


def rounding_rows(*, has_codes: bool) -> tuple[int, ...]:
    """Return the numbers of rows from which on the products of a model that is packed for bfloat16 round otherwise, in
    order. `has_codes`: whether some of its matrices are quantized."""
    if not library.has_bfloat16():
        return ()
    rows = {_dots_rows(), _floats_rows()} if has_codes else set()
    if processor.multiplies_floats_faster():
        rows.add(FLOAT32_ROWS)
    return tuple(sorted(rows - {0}))


def _dots_format(bits: int) -> int:
    return library.FORMAT_DOTS4 if bits == 4 else library.FORMAT_DOTS8


def _pack_blocks(weight: CodeBlocks, bias: Array | None, format: int, bfloat16_rows: int = 0) -> NativeLinear:
    out_features, num_groups, block_bytes = weight.data.shape
    in_features, has_offsets = num_groups * GROUP_SIZE, weight.bits == 4
    if (
        block_bytes != 2 + 2 * weight.stored_offsets + GROUP_SIZE * weight.bits // 8
        or weight.stored_offsets > has_offsets
    ):
        raise ValueError(f"linear: {block_bytes} bytes are no block of {weight.bits}-bit codes that is packed")
    data = np.ascontiguousarray(weight.data)
    num_weights = _panels(out_features) * library.PANEL * in_features
    packed = empty_weights(num_weights * weight.bits // 8, np.uint8)
    packed_scales = empty_weights(num_weights // GROUP_SIZE * (1 + has_offsets))
    launch.native().pagemill_pack_blocks(
        address(data),
        out_features,
        in_features,
        format,
        weight.stored_offsets,
        address(packed),
        address(packed_scales),
        launch.num_threads(),
    )
    shape = (out_features, in_features)
    parts = _Packed(shape, format, packed, packed_scales, GROUP_SIZE, has_offsets, bfloat16_rows)
    return NativeLinear(parts, bias)


def _panels(out_features: int) -> int:
    return -(-out_features // library.PANEL)
