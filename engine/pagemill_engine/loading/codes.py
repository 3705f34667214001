"""GGUF storage types that are group codes as they stand: integers with a scale and an offset for every 32.

Nothing is rounded anew: `codes * scales + offsets` are the values of `dequantize`. Types with groups of 16 (Q6_K) and
5-bit types with an offset (Q5_1, Q5_K) are turned into floats instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagemill_engine.loading.dequantize import block_bytes, fifth_bits, half, k_nibbles, k_scales, nibbles
from pagemill_kernels.linear.groups import GROUP_SIZE, GroupCodes

CODE_BITS: dict[str, int] = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q8_0": 8}
"""Bits of a code by storage type."""
SCALE_BITS = 2
"""Scale and offset, a float32 each for 32 codes."""

_Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes [n, block_elements], scales and offsets, each float32 [n, block_elements / 32]."""


def read_codes(kind: str, data: Tensor, shape: tuple[int, ...]) -> GroupCodes:
    """data: the stored bytes, uint8 [num_bytes]. Raises KeyError for a type that is not in `CODE_BITS`."""
    codes, scales, offsets = _SPLITS[kind](data.view(-1, block_bytes(kind)))
    groups = (shape[0], shape[1] // GROUP_SIZE)
    return GroupCodes(
        bits=4 if CODE_BITS[kind] == 4 else 8,
        codes=codes.view(shape),
        scales=scales.reshape(groups),
        offsets=None if offsets is None else offsets.reshape(groups),
    )


def _q4_0(blocks: Tensor) -> _Parts:
    scales = half(blocks, 0)
    return nibbles(blocks[:, 2:]), scales, -8.0 * scales


def _q4_1(blocks: Tensor) -> _Parts:
    return nibbles(blocks[:, 4:]), half(blocks, 0), half(blocks, 2)


def _q4_k(blocks: Tensor) -> _Parts:
    scales, minima = k_scales(blocks[:, 4:16])
    codes = k_nibbles(blocks[:, 16:]).flatten(1)
    return codes, half(blocks, 0) * scales.squeeze(-1), -half(blocks, 2) * minima.squeeze(-1)


def _q5_0(blocks: Tensor) -> _Parts:
    codes = nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)
    return codes.view(torch.int8) - 16, half(blocks, 0), None


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), half(blocks, 0), None


_SPLITS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
}
