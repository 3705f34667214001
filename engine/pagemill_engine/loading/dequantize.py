"""GGUF storage types to floats, in torch. Formats: github.com/ggml-org/ggml, src/ggml-quants.c and ggml-common.h.

A quantized tensor is a row of blocks; each function takes the bytes of n blocks, uint8 [n, block_bytes], and returns
their values, float32 [n, block_elements]. `dequantize_into` cuts large tensors into pieces so that temporaries stay
small.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PIECE_ELEMENTS = 1 << 20


def supported_types() -> list[str]:
    return [*_PLAIN, *_BLOCKS]


def block_bytes(kind: str) -> int:
    """Stored bytes of one block. Raises KeyError for a type that has no blocks."""
    return _BLOCKS[kind][1]


def dequantize_into(kind: str, data: Tensor, out: Tensor) -> None:
    """Fill `out` (contiguous in rows, any float type) from `data`, the stored bytes, uint8 [num_bytes].

    Raises KeyError for a storage type that is not in `supported_types()`.
    """
    if kind in _PLAIN:
        out.copy_(data.view(_PLAIN[kind]).view(out.shape))
        return
    block_elements, _, decode = _BLOCKS[kind]
    blocks = data.view(-1, block_bytes(kind))
    # Rows are whole blocks, so a 2-D view in block units fits any destination, also a slice of a fused weight.
    blocks_per_row = out.shape[-1] // block_elements
    rows = out.view(-1, out.shape[-1])
    step = max(1, PIECE_ELEMENTS // out.shape[-1])
    for start in range(0, rows.shape[0], step):
        stop = min(start + step, rows.shape[0])
        values = decode(blocks[start * blocks_per_row : stop * blocks_per_row])
        rows[start:stop].copy_(values.view(stop - start, -1))


def half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at a byte offset of each block, as float32 [n, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """[n, k] bytes to [n, 2k]: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def fifth_bits(blocks: Tensor, offset: int) -> Tensor:
    """32 bits in 4 bytes, lowest first, as uint8 [n, 32] with value 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[:, offset : offset + 4, None] >> shifts) & 1
    return bits.flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return (nibbles(blocks[:, 2:]).float() - 8.0) * half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return torch.addcmul(half(blocks, 2), nibbles(blocks[:, 4:]).float(), half(blocks, 0))


def _q5_0(blocks: Tensor) -> Tensor:
    quants = nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)
    return (quants.float() - 16.0) * half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    quants = nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4)
    return quants.float() * half(blocks, 0) + half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * half(blocks, 0)


def k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit minima in 12 bytes, each as float32 [n, 8, 1]."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=-1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=-1)
    return scales.float().unsqueeze(-1), minima.float().unsqueeze(-1)


def _scaled_k(blocks: Tensor, quants: Tensor) -> Tensor:
    """quants: [n, 8, 32] of Q4_K or Q5_K."""
    scales, minima = k_scales(blocks[:, 4:16])
    scale, minimum = half(blocks, 0).unsqueeze(-1), half(blocks, 2).unsqueeze(-1)
    return (scale * scales * quants.float() - minimum * minima).flatten(1)


def k_nibbles(packed: Tensor) -> Tensor:
    """128 bytes to [n, 8, 32]: of each 32 bytes the low halves, then the high halves."""
    rows = packed.reshape(-1, 4, 1, 32)
    return torch.cat((rows & 15, rows >> 4), dim=2).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled_k(blocks, k_nibbles(blocks[:, 16:]))


def k_fifth_bits(packed: Tensor) -> Tensor:
    """32 bytes to [n, 8, 32] with value 0 or 16: bit i of each byte belongs to row i."""
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    return ((packed.unsqueeze(1) >> shifts) & 1) << 4


def _q5_k(blocks: Tensor) -> Tensor:
    return _scaled_k(blocks, k_nibbles(blocks[:, 48:]) | k_fifth_bits(blocks[:, 16:48]))


def k_sixes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Q6_K's codes, 0 to 63, as uint8 [n, 16, 16], and their scales, float32 [n, 16]."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 16, 16)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).view(-1, 16, 16)
    return low | (high << 4), blocks[:, 192:208].contiguous().view(torch.int8).float()


def _q6_k(blocks: Tensor) -> Tensor:
    quants, scales = k_sixes(blocks)
    return (half(blocks, 208).unsqueeze(-1) * scales.unsqueeze(-1) * (quants.float() - 32.0)).flatten(1)


def mxfp4_codes(nibbles: Tensor) -> Tensor:
    """The e2m1 floats that 4 bits are, doubled, as int8 in the shape of `nibbles`."""
    return torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)[nibbles.long()]


def mxfp4_scales(exponents: Tensor) -> Tensor:
    """What doubled e2m1 floats are multiplied with: 2 ** (exponent - 128), float32."""
    return ((exponents.int() - 1).clamp(min=0) << 23).view(torch.float32)


def _mxfp4(blocks: Tensor) -> Tensor:
    return mxfp4_codes(nibbles(blocks[:, 1:])).float() * mxfp4_scales(blocks[:, :1])


def k_pairs(packed: Tensor) -> Tensor:
    """64 bytes to [n, 16, 16] with values 0 to 3: of each 32 bytes the lowest two bits, then the next two."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & 3).view(-1, 16, 16)


def q2_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Q2_K's scales and offsets of its 16 groups, float32 [n, 16]."""
    packed = blocks[:, :16]
    return half(blocks, 80) * (packed & 15).float(), -half(blocks, 82) * (packed >> 4).float()


def _q2_k(blocks: Tensor) -> Tensor:
    scales, offsets = q2_scales(blocks)
    return (scales.unsqueeze(-1) * k_pairs(blocks[:, 16:80]).float() + offsets.unsqueeze(-1)).flatten(1)


def q3_codes(blocks: Tensor) -> Tensor:
    """Q3_K's codes, -4 to 3, as int8 [n, 16, 16]; the third bit of eight codes lies in one byte."""
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    third = ((blocks[:, :32].unsqueeze(1) >> shifts) & 1).view(-1, 16, 16)
    return (k_pairs(blocks[:, 32:96]) | (third << 2)).view(torch.int8) - 4


def q3_scales(blocks: Tensor) -> Tensor:
    """Of Q3_K's 16 groups, float32 [n, 16]: six bits each in 12 bytes, whose last four hold the upper two."""
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    upper = ((high.unsqueeze(1) >> shifts) & 3).flatten(1)
    return half(blocks, 108) * ((nibbles(low) | (upper << 4)).float() - 32.0)


def _q3_k(blocks: Tensor) -> Tensor:
    return (q3_scales(blocks).unsqueeze(-1) * q3_codes(blocks).float()).flatten(1)


def iq4_codes(nibbles: Tensor) -> Tensor:
    """The 16 values of IQ4_NL and IQ4_XS, int8 in the shape of `nibbles`."""
    table = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return torch.tensor(table, dtype=torch.int8)[nibbles.long()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return iq4_codes(nibbles(blocks[:, 2:])).float() * half(blocks, 0)


def iq4_xs_nibbles(blocks: Tensor) -> Tensor:
    """As [n, 8, 32]."""
    return nibbles(blocks[:, 8:].reshape(-1, 8, 16))


def iq4_xs_scales(blocks: Tensor) -> Tensor:
    """Of IQ4_XS's eight groups, float32 [n, 8]: four low bits in bytes 4 to 7, two high bits in bytes 2 and 3."""
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = ((blocks[:, 2:4].unsqueeze(-1) >> shifts) & 3).flatten(1)
    return half(blocks, 0) * ((low | (high << 4)).float() - 32.0)


def _iq4_xs(blocks: Tensor) -> Tensor:
    return (iq4_codes(iq4_xs_nibbles(blocks)).float() * iq4_xs_scales(blocks).unsqueeze(-1)).flatten(1)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_BLOCKS: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
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
