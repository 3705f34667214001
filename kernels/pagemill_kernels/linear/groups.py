"""Quantized weights as numpy arrays: 4 or 8 bits per weight, a scale and an optional offset per group of inputs.

GGUF's quantized types and packed checkpoints have exactly this form (`pagemill_execution.weights` translates), so
nothing is requantized. `linear.quantize` quantizes floats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.arrays import Array
from pagemill_kernels.pieces import each_piece

GROUP_SIZE = 32
"""Size of the smallest group, except for 8-bit values in groups of `SMALL_GROUP_SIZE`; other sizes are multiples."""
SMALL_GROUP_SIZE = 16


@dataclass(slots=True, frozen=True)
class GroupCodes:
    """A quantized matrix.

    Column i has the values codes[o, i] * scales[o, i

    group_size] + offsets[o, i

    group_size], or with a table table[codes[o, i]] * scales[o, i

    group_size]; it is the weight of input `input_order[i]`.
    """

    bits: Literal[4, 8]
    codes: Array
    """uint8 [out, in], 0 to 15 (4 bits); int8 [out, in] (8 bits), or uint8 if `is_float`."""
    scales: NDArray[np.float32]
    """[out, in / group_size]."""
    offsets: NDArray[np.float32] | None
    """[out, in / group_size]; None means zero."""
    input_order: NDArray[np.int64] | None = None
    """[in]; None: columns are in the order of the inputs."""
    is_float: bool = False
    """Whether the values are 8-bit floats (e4m3), without offsets."""
    table: NDArray[np.float32] | None = None
    """[16]: the values of 4-bit indices, without offsets; None: integers."""

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale: a multiple of 32, or 16 for some 8-bit values."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def reordered(self, order: NDArray[np.int64]) -> GroupCodes:
        """Return the matrix with rows in another order: row i is row order[i]; int64 [out]."""
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], offsets=offsets)

    def with_columns(self, columns: NDArray[np.int64]) -> GroupCodes:
        """Return the matrix with these columns, which are whole groups; int64 [inputs]."""
        groups = columns[:: self.group_size] // self.group_size
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return replace(self, codes=self.codes[:, columns], scales=self.scales[:, groups], offsets=offsets)

    def times(self, factor: np.float32) -> GroupCodes:
        """Return the matrix with all values multiplied by a number."""
        return replace(
            self, scales=self.scales * factor, offsets=None if self.offsets is None else self.offsets * factor
        )

    def dequantize(self) -> NDArray[np.float32]:
        """Return the float values, [out, in], in the order of the inputs."""
        rows, columns = self.codes.shape
        values = np.empty((rows, columns), dtype=np.float32)
        each_piece(rows, columns, lambda rows: self._dequantize(rows, values))
        return values

    def _dequantize(self, rows: slice, out: NDArray[np.float32]) -> None:
        table = e4m3_values() if self.is_float else self.table
        codes = self.codes[rows].astype(np.float32) if table is None else table[self.codes[rows]]
        grouped = codes.reshape(len(codes), -1, self.group_size)
        grouped *= self.scales[rows, :, None]
        if self.offsets is not None:
            grouped += self.offsets[rows, :, None]
        out[rows, slice(None) if self.input_order is None else self.input_order] = codes


@dataclass(slots=True, frozen=True)
class CodeBlocks:
    """A quantized matrix in GGUF's simple stored types: blocks of 32 inputs, row by row.

    A block is a float16 scale, a float16 offset if `stored_offsets`, then the values. 8 bits: signed bytes, no offset.
    4 bits: 16 bytes, whose low halves are the first 16 values; without a stored offset it is -8 scales.
    """

    bits: Literal[4, 8]
    stored_offsets: bool
    data: NDArray[np.uint8]
    """[out, in / 32, block bytes]."""

    def reordered(self, order: NDArray[np.int64]) -> CodeBlocks:
        """Return the matrix with rows in another order: row i is row order[i]; int64 [out]."""
        return CodeBlocks(self.bits, self.stored_offsets, self.data[order])

    def with_columns(self, columns: NDArray[np.int64]) -> CodeBlocks:
        """Return the matrix with these columns, which are whole groups; int64 [inputs]."""
        return replace(self, data=self.data[:, columns[::GROUP_SIZE] // GROUP_SIZE])


def stack_blocks(parts: list[CodeBlocks]) -> CodeBlocks | None:
    """Return the parts of one width stacked by rows; None if they are of several kinds."""
    first = parts[0]
    if any((part.bits, part.stored_offsets) != (first.bits, first.stored_offsets) for part in parts):
        return None
    data = first.data if len(parts) == 1 else np.concatenate([part.data for part in parts])
    return CodeBlocks(first.bits, first.stored_offsets, data)


def stack(parts: list[GroupCodes]) -> GroupCodes | None:
    """Return the parts of one width stacked by rows; parts of another kind are widened without changing values.

    Returns None if they have no kind in common: floats and integers, several tables, or columns in several orders.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({part.is_float for part in parts}) > 1 or not all(
        _same(part.input_order, first.input_order) and _same(part.table, first.table) for part in parts
    ):
        return None
    bits: Literal[4, 8] = 4 if all(part.bits == 4 for part in parts) else 8
    group_size = math.gcd(*(part.group_size for part in parts))
    with_offsets = any(part.offsets is not None for part in parts)
    parts = [_widened(part, bits, group_size, with_offsets) for part in parts]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    codes = np.concatenate([part.codes for part in parts])
    scales = np.concatenate([part.scales for part in parts])
    joined = np.concatenate(offsets) if offsets else None
    return replace(first, bits=bits, codes=codes, scales=scales, offsets=joined)


@cache
def e4m3_values() -> NDArray[np.float32]:
    """Return the values of all 8-bit floats: sign, 4 bits of exponent with bias 7, 3 of mantissa; the highest is
    NaN."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    values[bits & 127 == 127] = np.nan
    return np.where(bits < 128, values, -values).astype(np.float32)


def _same(one: Array | None, other: Array | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def _widened(part: GroupCodes, bits: Literal[4, 8], group_size: int, with_offsets: bool) -> GroupCodes:
    """Return the same values with wider integers, smaller groups, and offsets if wanted."""
    codes = part.codes if part.bits == bits else part.codes.view(np.int8)
    offsets = part.offsets
    if offsets is None and with_offsets:
        offsets = np.zeros_like(part.scales)
    repeats = part.group_size // group_size
    scales = _repeated(part.scales, repeats)
    offsets = None if offsets is None else _repeated(offsets, repeats)
    return replace(part, bits=bits, codes=codes, scales=scales, offsets=offsets)


def _repeated(values: NDArray[np.float32], times: int) -> NDArray[np.float32]:
    return values if times == 1 else values.repeat(times, 1)
