"""Converts GGUF storage types to floats. Formats: github.com/ggml-org/ggml, src/ggml-quants.c and ggml-common.h.

A quantized tensor is a row of blocks; each function takes the bytes of n blocks, uint8 [n, block_bytes], and returns
their values, float32 [n, block_elements]. `dequantize_into` converts large tensors in pieces.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.weights.floats import copy_floats
from pagemill_kernels.arrays import NUMPY_TYPES, Array
from pagemill_kernels.linear.groups import e4m3_values
from pagemill_kernels.pieces import each_piece

Number = TypeVar("Number", bound=np.generic)
Bytes = Array
"""uint8 array. With numpy's array types mypy would infer wider integers for every shift and mask."""
Floats = NDArray[np.float32]
Codes = NDArray[np.int8]

_E2M1_DOUBLED: Codes = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=np.int8)
_IQ4: Codes = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=np.int8)


def supported_types() -> list[str]:
    return [*PLAIN, *_BLOCKS]


def block_bytes(kind: str) -> int:
    """Return the stored bytes of one block. Raises KeyError for a type that has no blocks."""
    return _BLOCKS[kind][1]


def dequantize_into(kind: str, data: Bytes, out: Array) -> None:
    """Fill `out` (contiguous, any float type) from `data`, the stored bytes, [num_bytes].

    Raises KeyError for a storage type that is not in `supported_types()`.
    """
    if kind in PLAIN:
        copy_floats(data.view(PLAIN[kind]).reshape(out.shape), out)
        return
    decode = _BLOCKS[kind][2]
    rows = out.reshape(-1, out.shape[-1])
    blocks = data.reshape(len(rows), -1, block_bytes(kind))

    def fill(piece: slice) -> None:
        values = decode(blocks[piece].reshape(-1, block_bytes(kind)))
        copy_floats(values.reshape(-1, out.shape[-1]), rows[piece])

    each_piece(*rows.shape, fill)


def half(blocks: Bytes, offset: int) -> Floats:
    """Return the float16 at a byte offset of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def flat(values: NDArray[Number]) -> NDArray[Number]:
    """Reshape [n, ...] to [n, k]."""
    return values.reshape(len(values), -1)


def nibbles(packed: Bytes) -> Bytes:
    """Unpack [n, k] bytes to [n, 2k]: all low halves, then all high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def fifth_bits(blocks: Bytes, offset: int) -> Bytes:
    """Unpack 32 bits in 4 bytes, lowest first, to uint8 [n, 32] with value 0 or 16."""
    shifts = np.arange(8, dtype=np.uint8)
    bits = (blocks[:, offset : offset + 4, None] >> shifts) & 1
    return flat(bits) << 4


def _q4_0(blocks: Bytes) -> Floats:
    return (nibbles(blocks[:, 2:]).astype(np.float32) - 8.0) * half(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    return nibbles(blocks[:, 4:]).astype(np.float32) * half(blocks, 0) + half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    quants = nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)
    return (quants.astype(np.float32) - 16.0) * half(blocks, 0)


def _q5_1(blocks: Bytes) -> Floats:
    quants = nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4)
    return quants.astype(np.float32) * half(blocks, 0) + half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * half(blocks, 0)


def k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Unpack eight 6-bit scales and eight 6-bit minima in 12 bytes, each to float32 [n, 8, 1]."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 2) & 48)), axis=-1)
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 2) & 48)), axis=-1)
    return scales.astype(np.float32)[..., None], minima.astype(np.float32)[..., None]


def _scaled_k(blocks: Bytes, quants: Bytes) -> Floats:
    """Return the values of Q4_K or Q5_K. `quants`: [n, 8, 32]."""
    scales, minima = k_scales(blocks[:, 4:16])
    scale, minimum = half(blocks, 0)[..., None], half(blocks, 2)[..., None]
    return flat(scale * scales * quants.astype(np.float32) - minimum * minima)


def k_nibbles(packed: Bytes) -> Bytes:
    """Unpack 128 bytes to [n, 8, 32]: of each 32 bytes the low halves, then the high halves."""
    rows = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((rows & 15, rows >> 4), axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Floats:
    return _scaled_k(blocks, k_nibbles(blocks[:, 16:]))


def k_fifth_bits(packed: Bytes) -> Bytes:
    """Unpack 32 bytes to [n, 8, 32] with value 0 or 16: bit i of each byte belongs to row i."""
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    return ((packed[:, None] >> shifts) & 1) << 4


def _q5_k(blocks: Bytes) -> Floats:
    return _scaled_k(blocks, k_nibbles(blocks[:, 48:]) | k_fifth_bits(blocks[:, 16:48]))


def k_sixes(blocks: Bytes) -> tuple[Bytes, Floats]:
    """Return Q6_K's quantized values, 0 to 63, as uint8 [n, 16, 16], and their scales, float32 [n, 16]."""
    packed = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(-1, 16, 16)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 16, 16)
    return low | (high << 4), blocks[:, 192:208].view(np.int8).astype(np.float32)


def _q6_k(blocks: Bytes) -> Floats:
    quants, scales = k_sixes(blocks)
    return flat(half(blocks, 208)[..., None] * scales[..., None] * (quants.astype(np.float32) - 32.0))


def mxfp4_codes(nibbles: Bytes) -> Codes:
    """Return the doubled e2m1 floats of 4-bit values, int8 in the shape of `nibbles`."""
    return _E2M1_DOUBLED[nibbles]


def mxfp4_scales(exponents: Bytes) -> Floats:
    """Return the factors of doubled e2m1 floats, 2 ** (exponent - 128), float32."""
    return ((exponents.astype(np.int32) - 1).clip(0) << 23).view(np.float32)


def _mxfp4(blocks: Bytes) -> Floats:
    return mxfp4_codes(nibbles(blocks[:, 1:])).astype(np.float32) * mxfp4_scales(blocks[:, :1])


def k_pairs(packed: Bytes) -> Bytes:
    """Unpack 64 bytes to [n, 16, 16] with values 0 to 3: of each 32 bytes the lowest two bits, then the next two."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 16, 16)


def q2_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return Q2_K's scales and offsets of its 16 groups, float32 [n, 16]."""
    packed = blocks[:, :16]
    return half(blocks, 80) * (packed & 15).astype(np.float32), -half(blocks, 82) * (packed >> 4).astype(np.float32)


def _q2_k(blocks: Bytes) -> Floats:
    scales, offsets = q2_scales(blocks)
    return flat(scales[..., None] * k_pairs(blocks[:, 16:80]).astype(np.float32) + offsets[..., None])


def q3_codes(blocks: Bytes) -> Codes:
    """Return Q3_K's quantized values, -4 to 3, as int8 [n, 16, 16].

    One byte contains the third bits of eight values.
    """
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    third = ((blocks[:, :32][:, None] >> shifts) & 1).reshape(-1, 16, 16)
    codes: Codes = (k_pairs(blocks[:, 32:96]) | (third << 2)).view(np.int8) - 4
    return codes


def q3_scales(blocks: Bytes) -> Floats:
    """Return the scales of Q3_K's 16 groups, float32 [n, 16].

    Each has six bits; the last four of their 12 bytes contain the upper two bits.
    """
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    upper = flat((high[:, None] >> shifts) & 3)
    scales: Floats = half(blocks, 108) * ((nibbles(low) | (upper << 4)).astype(np.float32) - 32.0)
    return scales


def _q3_k(blocks: Bytes) -> Floats:
    return flat(q3_scales(blocks)[..., None] * q3_codes(blocks).astype(np.float32))


def iq4_codes(nibbles: Bytes) -> Codes:
    """Return the table values of IQ4_NL and IQ4_XS, int8 in the shape of `nibbles`."""
    return _IQ4[nibbles]


def _iq4_nl(blocks: Bytes) -> Floats:
    return iq4_codes(nibbles(blocks[:, 2:])).astype(np.float32) * half(blocks, 0)


def iq4_xs_nibbles(blocks: Bytes) -> Bytes:
    """Unpack the 4-bit values to [n, 8, 32]."""
    return nibbles(blocks[:, 8:].reshape(-1, 8, 16))


def iq4_xs_scales(blocks: Bytes) -> Floats:
    """Return the scales of IQ4_XS's eight groups, float32 [n, 8].

    The four low bits are in bytes 4 to 7, the two high bits in bytes 2 and 3.
    """
    low = _nibble_pairs(blocks[:, 4:8])
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)
    high = flat((blocks[:, 2:4, None] >> shifts) & 3)
    scales: Floats = half(blocks, 0) * ((low | (high << 4)).astype(np.float32) - 32.0)
    return scales


def _iq4_xs(blocks: Bytes) -> Floats:
    return flat(iq4_codes(iq4_xs_nibbles(blocks)).astype(np.float32) * iq4_xs_scales(blocks)[..., None])


@cache
def _vectors(kind: str) -> Codes:
    """Return the vectors among which a type's indices choose, [number, 4 or 8]."""
    levels, size, numbers = _grids()[kind]
    digits = np.frombuffer(zlib.decompress(base64.b85decode(numbers)), dtype=np.uint8) - ord("0")
    return np.array(levels, dtype=np.int8)[digits].reshape(-1, size)


@cache
def _grids() -> dict[str, tuple[list[int], int, str]]:
    """Return for each type the levels of its grid, the size of a vector, and the levels' numbers.

    `tests/shared/iq_grids.py` writes the file from the package `gguf`; a test compares both.
    """
    found: dict[str, tuple[list[int], int, str]] = json.loads(Path(__file__).with_name("iq_grids.json").read_bytes())
    return found


def _signed(vectors: Codes, bits: Bytes) -> Codes:
    """Return the vectors' values, flat, negated where a bit is set. bits: uint8 [n, values / 8], lowest first."""
    values = vectors.reshape(len(bits), -1)
    negative = np.unpackbits(bits, axis=-1, bitorder="little").astype(bool)
    return np.where(negative, -values, values)


def _eight_signs(seven: Array) -> Bytes:
    """Return the bytes of signs of which files store seven bits: the number of set bits is even."""
    low = (seven & 127).astype(np.uint8)
    parity = np.bitwise_xor.reduce(np.unpackbits(low[..., None], axis=-1), axis=-1)
    signs: Bytes = low | (parity << 7)
    return signs


def _words(blocks: Bytes, first: int, end: int, kind: type[np.unsignedinteger[Any]]) -> Array:
    return np.ascontiguousarray(blocks[:, first:end]).view(kind)


def _nibble_pairs(data: Bytes) -> Bytes:
    """Return the two halves of each byte side by side, the lower one first."""
    pairs: Bytes = flat(np.stack((data & 15, data >> 4), axis=-1))
    return pairs


def _signs_and_scale(words: Array) -> tuple[Bytes, Floats]:
    """Split words of four signs of seven bits and a scale of four bits."""
    shifts = np.array([0, 7, 14, 21], dtype=np.uint32)
    return flat(_eight_signs(words[..., None] >> shifts)), (words >> 28).astype(np.float32) + np.float32(0.5)


def iq2_xxs(blocks: Bytes) -> tuple[Codes, Floats]:
    words = _words(blocks, 2, 66, np.uint32).reshape(len(blocks), 8, 2)
    indices = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    signs, scales = _signs_and_scale(words[..., 1])
    return _signed(_vectors("IQ2_XXS")[indices], signs), half(blocks, 0) * scales * np.float32(0.25)


def iq2_xs(blocks: Bytes) -> tuple[Codes, Floats]:
    words = _words(blocks, 2, 66, np.uint16)
    scales = half(blocks, 0) * (_nibble_pairs(blocks[:, 66:74]).astype(np.float32) + np.float32(0.5)) * np.float32(0.25)
    return _signed(_vectors("IQ2_XS")[words & 511], _eight_signs(words >> 9)), scales


def iq2_s(blocks: Bytes) -> tuple[Codes, Floats]:
    high = flat((blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3)
    indices = blocks[:, 2:34].astype(np.uint16) | (high.astype(np.uint16) << 8)
    scales = half(blocks, 0) * (_nibble_pairs(blocks[:, 74:82]).astype(np.float32) + np.float32(0.5)) * np.float32(0.25)
    return _signed(_vectors("IQ2_S")[indices], blocks[:, 34:66]), scales


def iq3_xxs(blocks: Bytes) -> tuple[Codes, Floats]:
    signs, scales = _signs_and_scale(_words(blocks, 66, 98, np.uint32))
    return _signed(_vectors("IQ3_XXS")[blocks[:, 2:66]], signs), half(blocks, 0) * scales * np.float32(0.5)


def iq3_s(blocks: Bytes) -> tuple[Codes, Floats]:
    high = np.unpackbits(blocks[:, 66:74], axis=-1, bitorder="little")
    indices = blocks[:, 2:66].astype(np.uint16) | (high.astype(np.uint16) << 8)
    scales = _nibble_pairs(blocks[:, 106:110])
    return _signed(_vectors("IQ3_S")[indices], blocks[:, 74:106]), half(blocks, 0) * (1 + 2 * scales.astype(np.float32))


def iq1_s(blocks: Bytes) -> tuple[Codes, Floats]:
    """Values are a scale times -1, 0 or 1, moved by an eighth up or down."""
    high = _words(blocks, 34, 50, np.uint16)
    indices = flat((high[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & 7) << 8 | blocks[:, 2:34]
    moved = np.where(high & 0x8000, -1, 1).astype(np.int8)
    codes = 8 * _vectors("IQ1_S")[indices].reshape(len(blocks), 8, 32) + moved[..., None]
    return flat(codes), half(blocks, 0) * (2 * ((high >> 12) & 7) + 1).astype(np.float32) * np.float32(0.125)


def iq1_m(blocks: Bytes) -> tuple[Codes, Floats]:
    """As IQ1_S, with a scale for 16 values and a move for eight. The float16 lies in the upper bits of the scales."""
    words = _words(blocks, 48, 56, np.uint16)
    upper = (words & 0xF000) >> np.array([12, 8, 4, 0], dtype=np.uint16)
    whole = np.bitwise_or.reduce(upper, axis=-1, keepdims=True).view(np.float16).astype(np.float32)
    scales = flat((words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & 7)
    high = _nibble_pairs(blocks[:, 32:48])
    indices = blocks[:, :32].astype(np.uint16) | ((high & 7).astype(np.uint16) << 8)
    moved = np.where(high & 8, -1, 1).astype(np.int8)
    codes = 8 * _vectors("IQ1_S")[indices] + moved[..., None]
    return flat(flat(codes)), whole * (2 * scales + 1).astype(np.float32) * np.float32(0.125)


def tq1_0(blocks: Bytes) -> tuple[Codes, Floats]:
    """Five values of three levels in a byte: digits of base three of the fraction that the byte is of 256."""
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:, None]
    digits = [
        (blocks[:, None, first:end] * powers[:number]).reshape(len(blocks), -1)
        for first, end, number in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    codes = ((np.concatenate(digits, axis=-1).astype(np.uint16) * 3) >> 8).astype(np.int8) - 1
    return codes, np.repeat(half(blocks, 52), 8, axis=-1)


def tq2_0(blocks: Bytes) -> tuple[Codes, Floats]:
    pairs = blocks[:, :64].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return (pairs & 3).reshape(len(blocks), 256).view(np.int8) - 1, np.repeat(half(blocks, 64), 8, axis=-1)


def nvfp4(blocks: Bytes) -> tuple[Codes, Floats]:
    """Split blocks of doubled e2m1 floats, whose scales are 8-bit floats (e4m3) without signs; not a number is 0."""
    codes = mxfp4_codes(nibbles(blocks[:, 4:].reshape(-1, 4, 8)))
    return codes.reshape(len(blocks), 64), np.nan_to_num(e4m3_values()[blocks[:, :4] & 127] * np.float32(0.5))


SCALED: dict[str, tuple[int, int, Callable[[Bytes], tuple[Codes, Floats]]]] = {
    "IQ1_S": (256, 50, iq1_s),
    "IQ1_M": (256, 56, iq1_m),
    "IQ2_XXS": (256, 66, iq2_xxs),
    "IQ2_XS": (256, 74, iq2_xs),
    "IQ2_S": (256, 82, iq2_s),
    "IQ3_XXS": (256, 98, iq3_xxs),
    "IQ3_S": (256, 110, iq3_s),
    "TQ1_0": (256, 54, tq1_0),
    "TQ2_0": (256, 66, tq2_0),
    "NVFP4": (64, 36, nvfp4),
}
"""Values and bytes of a block, and the function that splits blocks into integers and scales of equal groups."""


def _multiplied(split: Callable[[Bytes], tuple[Codes, Floats]], blocks: Bytes) -> Floats:
    codes, scales = split(blocks)
    return flat(codes.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None])


PLAIN: dict[str, np.dtype[Any]] = {
    "F32": NUMPY_TYPES["float32"],
    "F16": NUMPY_TYPES["float16"],
    "BF16": NUMPY_TYPES["bfloat16"],
    "F64": np.dtype(np.float64),
}

_BLOCKS: dict[str, tuple[int, int, Callable[[Bytes], Floats]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "IQ4_NL": (32, 18, _iq4_nl),
    "IQ4_XS": (256, 136, _iq4_xs),
    "MXFP4": (32, 17, _mxfp4),
    **{kind: (size, num_bytes, partial(_multiplied, split)) for kind, (size, num_bytes, split) in SCALED.items()},
}
