"""Triton's matmuls with quantized weights, and its gathers, equal those of the dequantized weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from code_kinds import group_codes, values_of
from numpy.typing import NDArray
from triton_device import DEVICE, NARROW_TYPES, close, random

from pagemill_kernels.gather import reference as gather_reference
from pagemill_kernels.gather import triton_launch as gather
from pagemill_kernels.linear import triton_launch
from pagemill_kernels.linear.groups import GroupCodes
from pagemill_kernels.linear.quantize import quantize


def codes_of(bits: Literal[4, 8], out: int, size: int, *, group_size: int = 32, offsets: bool = True) -> GroupCodes:
    generator = torch.Generator().manual_seed(2)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (out, size), generator=generator).to(torch.uint8 if bits == 4 else torch.int8)
    scales = torch.rand(out, size // group_size, generator=generator) / high
    return group_codes(bits, codes, scales, torch.randn(scales.shape, generator=generator) / 8 if offsets else None)


def shuffled(size: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).permutation(size)


CODES = {
    "4 bits": codes_of(4, 40, 96),
    "4 bits without offsets": codes_of(4, 33, 64, offsets=False),
    "8 bits": codes_of(8, 40, 160, offsets=False),
    "8 bits with offsets": codes_of(8, 40, 96),
    "8 bits in groups of 16": codes_of(8, 40, 96, group_size=16, offsets=False),
    "8 bits in groups of 16 with offsets": codes_of(8, 40, 96, group_size=16),
    "one group": codes_of(4, 5, 32),
    "4 bits in groups of 64": codes_of(4, 40, 192, group_size=64),
    "8 bits in one group": codes_of(8, 40, 96, group_size=96, offsets=False),
    "4 bits in another order": replace(codes_of(4, 40, 192, group_size=96), input_order=shuffled(192)),
    "8 bits in another order": replace(codes_of(8, 40, 96), input_order=shuffled(96)),
}


@pytest.mark.parametrize(("rows", "in_tiles"), [(1, True), (70, True), (70, False)], ids=["1", "70", "as floats"])
@pytest.mark.parametrize("kind", CODES)
def test_matmuls_equal_those_of_the_dequantized_weights(
    kind: str, rows: int, in_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many rows, some rows of the weight are dequantized at a time: here 13 of up to 40."""
    most = 1 << 30 if in_tiles else 0
    monkeypatch.setattr(triton_launch, "MOST_ROWS_IN_TILES", {4: most, 8: most})
    monkeypatch.setattr(triton_launch, "FLOATS_AT_ONCE", 13 * CODES[kind].codes.shape[1])
    weight = values_of(CODES[kind]).to(DEVICE)
    bias = random(len(weight), seed=3)
    linear = triton_launch.pack_codes(CODES[kind], bias)
    x = random(rows, weight.shape[1], seed=4)
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=1e-4)
    out = random(rows, len(weight), seed=5)
    total = out + expected
    linear.add_to(out, x)
    torch.testing.assert_close(out, total, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", NARROW_TYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_16_bit_activations_equal_the_reference(bits: Literal[4, 8], dtype: torch.dtype) -> None:
    codes = quantize(np.random.default_rng(0).standard_normal((48, 64), dtype=np.float32), bits)
    x = random(9, 64, dtype=dtype)
    close(triton_launch.pack_codes(codes, None)(x), F.linear(x, values_of(codes).to(DEVICE, dtype)))


@pytest.mark.parametrize("kind", CODES)
def test_rows_are_gathered_exactly(kind: str) -> None:
    linear = triton_launch.pack_codes(CODES[kind], None)
    ids = torch.tensor([[4, 0], [3, 4]], device=DEVICE)
    torch.testing.assert_close(linear.gather(ids), values_of(CODES[kind]).to(DEVICE)[ids])
    assert linear.gather(ids[:0]).shape == (0, 2, CODES[kind].codes.shape[1])


def test_quantized_weights_use_only_their_own_memory() -> None:
    weight = codes_of(4, 64, 320)
    assert triton_launch.pack_codes(weight, None).num_bytes == 64 * 320 // 2 + 2 * 4 * 64 * 10


def test_weights_that_are_not_packed_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="48 inputs"):
        triton_launch.pack_codes(codes_of(8, 8, 48, group_size=16), None)
    with pytest.raises(ValueError, match="groups of 16"):
        triton_launch.pack_codes(codes_of(4, 8, 64, group_size=16), None)


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    packed = triton_launch.pack_codes(codes_of(4, 8, 64), None)
    with pytest.raises(ValueError, match="rows of 64"):
        packed(random(2, 32))
    with pytest.raises(ValueError, match="rows of 64"):
        packed(random(64, 2).t())
    with pytest.raises(ValueError, match="int32"):
        packed(torch.ones(2, 64, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match=r"out is \[3, 8\], \[2, 8\] is needed"):
        packed.add_to(random(3, 8), random(2, 64))
    with pytest.raises(ValueError, match="out has strides"):
        packed.add_to(random(8, 2).t(), random(2, 64))


@pytest.mark.parametrize("bias", [False, True])
def test_float_matmuls_equal_the_reference(bias: bool) -> None:
    weight, b = random(24, 40), random(24, seed=1) if bias else None
    linear, x, out = triton_launch.pack_linear(weight, b), random(3, 40, seed=2), random(3, 24, seed=3)
    expected = F.linear(x, weight, b)
    close(linear(x), expected)
    total = out + expected
    linear.add_to(out, x)
    close(out, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_equal_the_reference(dtype: torch.dtype) -> None:
    table = random(50, 1100, dtype=dtype)[:, :1030]
    ids = torch.tensor([49, 0, 7, 7], device=DEVICE)
    assert torch.equal(gather.gather_rows(table, ids), gather_reference.gather_rows(table, ids))
    assert gather.gather_rows(table, ids[:0]).shape == (0, 1030)
    with pytest.raises(ValueError, match="int64"):
        gather.gather_rows(table, ids.int())
    with pytest.raises(ValueError, match="neighbouring"):
        gather.gather_rows(table.t(), ids)
    with pytest.raises(ValueError, match="on meta"):
        gather.gather_rows(table, ids.to("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64, 300])
@pytest.mark.parametrize("bits", [4, 8])
def test_layers_of_realistic_size_equal_the_reference(bits: Literal[4, 8], rows: int) -> None:
    codes = codes_of(bits, 4096, 14336)
    x = random(rows, 14336, dtype=torch.bfloat16) / 100
    close(triton_launch.pack_codes(codes, None)(x), F.linear(x, values_of(codes).to(DEVICE, torch.bfloat16)))
