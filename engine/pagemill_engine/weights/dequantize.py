"""Converts GGUF storage types to floats. Formats: github.com/ggml-org/ggml, src/ggml-quants.c and ggml-common.h.

A quantized tensor is a row of blocks; each function takes the bytes of n blocks, uint8 [n, block_bytes], and returns
their values, float32 [n, block_elements]. `dequantize_into` converts large tensors in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagemill_engine.weights.floats import copy_floats
from pagemill_kernels.arrays import NUMPY_TYPES, Array
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
    low = flat(np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=-1))
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)
    high = flat((blocks[:, 2:4, None] >> shifts) & 3)
    scales: Floats = half(blocks, 0) * ((low | (high << 4)).astype(np.float32) - 32.0)
    return scales


def _iq4_xs(blocks: Bytes) -> Floats:
    return flat(iq4_codes(iq4_xs_nibbles(blocks)).astype(np.float32) * iq4_xs_scales(blocks)[..., None])


PLAIN = {"F32": NUMPY_TYPES["float32"], "F16": NUMPY_TYPES["float16"], "BF16": NUMPY_TYPES["bfloat16"]}

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
}
