"""Converts GGUF storage types into `GroupCodes`: integers with a scale and an optional offset per group of 32 or 16.

Nothing is rounded again: `codes * scales + offsets` are the values of `dequantize`. 8-bit integers also store the types
of 5 and 6 bits, those of 1 to 3 bits, whose groups may be smaller than those of 4-bit integers, the table values
of IQ4_NL and IQ4_XS, and the doubled 4-bit floats of MXFP4 and NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from pagemill_execution.weights.dequantize import (
    SCALED,
    Bytes,
    Codes,
    Floats,
    block_bytes,
    fifth_bits,
    flat,
    half,
    iq4_codes,
    iq4_xs_nibbles,
    iq4_xs_scales,
    k_fifth_bits,
    k_nibbles,
    k_pairs,
    k_scales,
    k_sixes,
    mxfp4_codes,
    mxfp4_scales,
    nibbles,
    q2_scales,
    q3_codes,
    q3_scales,
)
from pagemill_kernels.arrays import Array
from pagemill_kernels.linear.groups import GROUP_SIZE, SMALL_GROUP_SIZE, CodeBlocks, GroupCodes
from pagemill_kernels.pieces import each_piece


class CodeKind(NamedTuple):
    """The form of a storage type's quantized values in memory."""

    bits: Literal[4, 8]
    group_size: int = GROUP_SIZE
    has_offsets: bool = False
    is_float: bool = False

    @property
    def stored_bits(self) -> float:
        """Bits of one weight, with its share of the float32 scale and offset."""
        return self.bits + 32 * (1 + self.has_offsets) / self.group_size

    def __str__(self) -> str:
        return f"{self.bits}-bit {'floats' if self.is_float else 'codes'} of {self.stored_bits:.4g} bits a weight"


CODE_KINDS: dict[str, CodeKind] = {
    "Q2_K": CodeKind(8, group_size=SMALL_GROUP_SIZE, has_offsets=True),
    "Q3_K": CodeKind(8, group_size=SMALL_GROUP_SIZE),
    "Q4_0": CodeKind(4, has_offsets=True),
    "Q4_1": CodeKind(4, has_offsets=True),
    "Q4_K": CodeKind(4, has_offsets=True),
    "Q5_0": CodeKind(8),
    "Q5_1": CodeKind(8, has_offsets=True),
    "Q5_K": CodeKind(8, has_offsets=True),
    "Q6_K": CodeKind(8, group_size=SMALL_GROUP_SIZE),
    "Q8_0": CodeKind(8),
    "IQ4_NL": CodeKind(8),
    "IQ4_XS": CodeKind(8),
    "MXFP4": CodeKind(8),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"), CodeKind(8)),
    **dict.fromkeys(("IQ1_M", "IQ2_XS", "IQ2_S", "NVFP4"), CodeKind(8, group_size=SMALL_GROUP_SIZE)),
}


def describe_codes(stored_as: str, kinds: Iterable[CodeKind | None]) -> str:
    """Return a description of stored tensors and their form in memory. `kinds`: one per tensor, None for floats."""
    found = sorted({str(kind) for kind in kinds if kind is not None})
    return f"{stored_as} as {' and '.join(found) or 'floats'}"


_STORED_OFFSETS = {"Q4_0": False, "Q4_1": True, "Q8_0": False}
"""Types whose stored blocks are `CodeBlocks` without conversion, and whether they have offsets."""

_Parts = tuple[Bytes | Codes, Floats, Floats | None]
"""Quantized values, scales and offsets of n blocks, in the number of columns that each has."""


def read_codes(kind: str, data: Bytes, shape: tuple[int, ...]) -> GroupCodes:
    """Return a tensor as quantized values. `data`: the stored bytes, [num_bytes].

    Raises KeyError for a type that is not in `CODE_KINDS`.
    """
    split, found, num_bytes = _SPLITS[kind], CODE_KINDS[kind], block_bytes(kind)
    blocks = data.reshape(shape[0], -1, num_bytes)
    groups = (shape[0], shape[1] // found.group_size)
    codes: Array = np.empty(shape, dtype=np.uint8 if found.bits == 4 else np.int8)
    scales = np.empty(groups, dtype=np.float32)
    offsets = np.empty(groups, dtype=np.float32) if found.has_offsets else None

    def fill(rows: slice) -> None:
        piece, piece_scales, piece_offsets = split(blocks[rows].reshape(-1, num_bytes))
        codes[rows] = piece.reshape(-1, shape[1])
        scales[rows] = piece_scales.reshape(-1, groups[1])
        if offsets is not None and piece_offsets is not None:
            offsets[rows] = piece_offsets.reshape(-1, groups[1])

    each_piece(shape[0], shape[1], fill)
    return GroupCodes(found.bits, codes, scales, offsets)


def has_blocks(kind: str) -> bool:
    """Whether stored blocks of the type are `CodeBlocks`."""
    return kind in _STORED_OFFSETS


def read_blocks(kind: str, data: Bytes, shape: tuple[int, ...]) -> CodeBlocks | None:
    """Return the stored blocks; None for a type with other blocks. `data`: as for `read_codes`."""
    if not has_blocks(kind):
        return None
    blocks = data.reshape(shape[0], shape[1] // GROUP_SIZE, block_bytes(kind))
    return CodeBlocks(CODE_KINDS[kind].bits, _STORED_OFFSETS[kind], blocks)


def _q4_0(blocks: Bytes) -> _Parts:
    scales = half(blocks, 0)
    return nibbles(blocks[:, 2:]), scales, -8.0 * scales


def _q4_1(blocks: Bytes) -> _Parts:
    return nibbles(blocks[:, 4:]), half(blocks, 0), half(blocks, 2)


def _q4_k(blocks: Bytes) -> _Parts:
    return k_nibbles(blocks[:, 16:]), *_k_offsets(blocks)


def _q5_0(blocks: Bytes) -> _Parts:
    codes = nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)
    return codes.view(np.int8) - 16, half(blocks, 0), None


def _q5_1(blocks: Bytes) -> _Parts:
    codes = nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4)
    return codes.view(np.int8), half(blocks, 0), half(blocks, 2)


def _q5_k(blocks: Bytes) -> _Parts:
    codes = k_nibbles(blocks[:, 48:]) | k_fifth_bits(blocks[:, 16:48])
    return codes.view(np.int8), *_k_offsets(blocks)


def _q6_k(blocks: Bytes) -> _Parts:
    codes, scales = k_sixes(blocks)
    return codes.view(np.int8) - 32, half(blocks, 208) * scales, None


def _q8_0(blocks: Bytes) -> _Parts:
    return blocks[:, 2:].view(np.int8), half(blocks, 0), None


def _mxfp4(blocks: Bytes) -> _Parts:
    return mxfp4_codes(nibbles(blocks[:, 1:])), mxfp4_scales(blocks[:, :1]), None


def mxfp4_pairs(blocks: Bytes, exponents: Bytes) -> GroupCodes:
    """Convert MXFP4 as Hugging Face stores it: neighbouring inputs are the low and high half of a byte.

    blocks: uint8 [out, in / 32, 16]; exponents: uint8 [out, in / 32].
    """
    neighbours = np.stack((blocks & 15, blocks >> 4), axis=-1)
    return GroupCodes(8, flat(mxfp4_codes(neighbours)), mxfp4_scales(exponents), None)


def _k_offsets(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return scales and offsets of Q4_K and Q5_K."""
    scales, minima = k_scales(blocks[:, 4:16])
    return half(blocks, 0) * scales[..., 0], -half(blocks, 2) * minima[..., 0]


def _q2_k(blocks: Bytes) -> _Parts:
    return k_pairs(blocks[:, 16:80]).view(np.int8), *q2_scales(blocks)


def _q3_k(blocks: Bytes) -> _Parts:
    return q3_codes(blocks), q3_scales(blocks), None


def _iq4_nl(blocks: Bytes) -> _Parts:
    return iq4_codes(nibbles(blocks[:, 2:])), half(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> _Parts:
    return iq4_codes(iq4_xs_nibbles(blocks)), iq4_xs_scales(blocks), None


def _scaled(split: Callable[[Bytes], tuple[Codes, Floats]], blocks: Bytes) -> _Parts:
    return *split(blocks), None


_SPLITS: dict[str, Callable[[Bytes], _Parts]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    **{kind: partial(_scaled, split) for kind, (_, _, split) in SCALED.items()},
}
