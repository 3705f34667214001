"""GGUF storage types are group codes as they stand: integers with a scale and perhaps an offset for every 32 or 16.

Nothing is rounded anew: `codes * scales + offsets` are the values of `dequantize`. Types of 5 and 6 bits take 8-bit
codes, and so do those of 2 and 3 bits, whose groups are smaller than those of 4-bit codes, the tables of IQ4_NL and
IQ4_XS, and the floats of 4 bits of MXFP4, doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pagemill_engine.loading.dequantize import (
    block_bytes,
    fifth_bits,
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
from pagemill_kernels.linear.groups import GROUP_SIZE, SMALL_GROUP_SIZE, CodeBlocks, GroupCodes


class CodeKind(NamedTuple):
    """How a storage type's codes lie in memory."""

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
}


def in_words(stored_as: str, kinds: Iterable[CodeKind | None]) -> str:
    """What tensors that files store so are in memory. `kinds`: those of all tensors, `None` for floats."""
    found = sorted({str(kind) for kind in kinds if kind is not None})
    return f"{stored_as} as {' and '.join(found) or 'floats'}"


_STORED_OFFSETS = {"Q4_0": False, "Q4_1": True, "Q8_0": False}
"""Types whose blocks are `CodeBlocks` as they stand, and whether an offset lies beside the scale."""

_Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes [n, block_elements], scales and offsets, each float32 [n, block_elements / group_size]."""


def read_codes(kind: str, data: Tensor, shape: tuple[int, ...]) -> GroupCodes:
    """data: the stored bytes, uint8 [num_bytes]. Raises KeyError for a type that is not in `CODE_KINDS`."""
    codes, scales, offsets = _SPLITS[kind](data.view(-1, block_bytes(kind)))
    groups = (shape[0], shape[1] // CODE_KINDS[kind].group_size)
    return GroupCodes(
        bits=CODE_KINDS[kind].bits,
        codes=codes.view(shape),
        scales=scales.reshape(groups),
        offsets=None if offsets is None else offsets.reshape(groups),
    )


def read_blocks(kind: str, data: Tensor, shape: tuple[int, ...]) -> CodeBlocks | None:
    """data as for `read_codes`; `None` for a type of other blocks."""
    if kind not in _STORED_OFFSETS:
        return None
    blocks = data.view(shape[0], shape[1] // GROUP_SIZE, block_bytes(kind))
    return CodeBlocks(CODE_KINDS[kind].bits, _STORED_OFFSETS[kind], blocks)


def _q4_0(blocks: Tensor) -> _Parts:
    scales = half(blocks, 0)
    return nibbles(blocks[:, 2:]), scales, -8.0 * scales


def _q4_1(blocks: Tensor) -> _Parts:
    return nibbles(blocks[:, 4:]), half(blocks, 0), half(blocks, 2)


def _q4_k(blocks: Tensor) -> _Parts:
    return k_nibbles(blocks[:, 16:]).flatten(1), *_k_offsets(blocks)


def _q5_0(blocks: Tensor) -> _Parts:
    codes = nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)
    return codes.view(torch.int8) - 16, half(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Parts:
    codes = nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4)
    return codes.view(torch.int8), half(blocks, 0), half(blocks, 2)


def _q5_k(blocks: Tensor) -> _Parts:
    codes = k_nibbles(blocks[:, 48:]) | k_fifth_bits(blocks[:, 16:48])
    return codes.flatten(1).view(torch.int8), *_k_offsets(blocks)


def _q6_k(blocks: Tensor) -> _Parts:
    codes, scales = k_sixes(blocks)
    return codes.flatten(1).view(torch.int8) - 32, half(blocks, 208) * scales, None


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), half(blocks, 0), None


def _mxfp4(blocks: Tensor) -> _Parts:
    return mxfp4_codes(nibbles(blocks[:, 1:])), mxfp4_scales(blocks[:, :1]), None


def mxfp4_pairs(blocks: Tensor, exponents: Tensor) -> GroupCodes:
    """As Hugging Face stores MXFP4: neighbouring inputs are low and high half of a byte.

    blocks: uint8 [out, in / 32, 16]; exponents: uint8 [out, in / 32].
    """
    neighbours = torch.stack((blocks & 15, blocks >> 4), dim=-1)
    return GroupCodes(8, mxfp4_codes(neighbours).flatten(1), mxfp4_scales(exponents), None)


def _k_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of Q4_K and Q5_K."""
    scales, minima = k_scales(blocks[:, 4:16])
    return half(blocks, 0) * scales.squeeze(-1), -half(blocks, 2) * minima.squeeze(-1)


def _q2_k(blocks: Tensor) -> _Parts:
    return k_pairs(blocks[:, 16:80]).flatten(1).view(torch.int8), *q2_scales(blocks)


def _q3_k(blocks: Tensor) -> _Parts:
    return q3_codes(blocks).flatten(1), q3_scales(blocks), None


def _iq4_nl(blocks: Tensor) -> _Parts:
    return iq4_codes(nibbles(blocks[:, 2:])), half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> _Parts:
    return iq4_codes(iq4_xs_nibbles(blocks)).flatten(1), iq4_xs_scales(blocks), None


_SPLITS: dict[str, Callable[[Tensor], _Parts]] = {
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
}
