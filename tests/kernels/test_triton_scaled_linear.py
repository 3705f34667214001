"""Triton's matmuls of 8-bit weights with 8-bit activations equal the formula, with the same rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton_device import CODE_TYPES, DEVICE, HAS_GPU, NARROW_TYPES, close, random

from pagemill_kernels.gpu import launch
from pagemill_kernels.gpu.triton_body import round_to_codes
from pagemill_kernels.scaled_linear import channels, reference, triton_launch
from pagemill_kernels.scaled_linear.channels import ChannelCodes, quantize_channels

INT8, FP8 = torch.int8, torch.float8_e4m3fn


@triton.jit
def round_all(x_ptr, codes_ptr, SIZE: tl.constexpr, IS_FP8: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(codes_ptr + at, round_to_codes(tl.load(x_ptr + at), IS_FP8))


@pytest.mark.parametrize("dtype", CODE_TYPES[1:])
def test_every_fp8_number_and_every_midpoint_is_rounded_like_torch(dtype: torch.dtype) -> None:
    numbers = torch.arange(127, dtype=torch.uint8).view(dtype).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    sides = torch.cat([numbers, middles, middles * (1 - 1e-6), middles * (1 + 1e-6), torch.tensor([1e-30, 1e-3])])
    x = F.pad(torch.cat([sides, -sides]), (0, 1024 - 2 * len(sides))).to(DEVICE)
    codes = torch.empty(1024, dtype=dtype, device=DEVICE)
    round_all[(1,)](x_ptr=x, codes_ptr=codes, SIZE=1024, IS_FP8=True)
    assert torch.equal(codes.float(), x.to(dtype).float())


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 33, 100])
@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_each_row_is_quantized_with_its_own_scale(size: int, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    wide = random(5, size + 7, dtype=x_dtype) * torch.tensor([1.0, 1e-4, 200.0, 0.0, 1.0], device=DEVICE)[:, None]
    x = wide.to(x_dtype)[:, :size]
    (codes, scales), (expected, expected_scales) = triton_launch.encode_rows(x, dtype), channels.encode_rows(x, dtype)
    close(scales, expected_scales)
    decoded, theirs = codes.float() * scales[:, None], expected.float() * expected_scales[:, None]
    step = 1 if dtype == INT8 else 32
    assert bool(((decoded - theirs).abs() <= step * 1.01 * scales[:, None]).all())
    if not HAS_GPU:  # a device's division may differ from the processor's in the last bit
        assert torch.equal(codes.float(), expected.float())
    assert not codes[3].float().any()
    assert scales[3] == 0


@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_a_row_longer_than_a_programs_capacity_is_read_twice(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = random(3, 150)
    x[1, 149] = 77.0
    at_once = triton_launch.encode_rows(x, dtype)
    monkeypatch.setattr(triton_launch, "ENCODE_BLOCK", 64)
    in_pieces = triton_launch.encode_rows(x, dtype)
    assert torch.equal(at_once[0].float(), in_pieces[0].float())
    assert torch.equal(at_once[1], in_pieces[1])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_a_row_that_is_not_finite_remains_so_and_affects_no_other(
    dtype: torch.dtype, bad: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "ENCODE_BLOCK", block)
    linear = triton_launch.ScaledLinear(quantize_channels(random(8, 100), dtype), None)
    x = random(3, 100, seed=1)
    clean = linear(x)
    x[1, 70] = bad
    broken = linear(x)
    assert not broken[1].isfinite().any()
    assert torch.equal(broken[[0, 2]], clean[[0, 2]])


SHAPES = {"whole tiles": (64, 256), "tails": (45, 83), "narrower than a tile": (3, 16), "wide": (130, 300)}


@pytest.mark.sample("*tails-*", "*-whole tiles-16", "*-wide-50")
@pytest.mark.parametrize("rows", [1, 16, 50, 133])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_matmuls_equal_the_formula(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    weight, bias = quantize_channels(random(*shape), dtype), random(shape[0], seed=3)
    linear = triton_launch.ScaledLinear(weight, bias)
    x = random(rows, shape[1], seed=4)
    expected = reference.multiply(x, weight, bias)
    most = 1e-3 + 1e-4 * expected.abs()
    if HAS_GPU and dtype == torch.float8_e4m3fn:
        # Hopper's matrix units keep 14 bits of the largest number while they add e4m3 products.
        most += 2**-12 * reference.multiply(x.abs(), ChannelCodes(magnitudes(weight.codes), weight.scales), None)
    assert ((linear(x) - expected).abs() <= most).all()
    out = random(rows, shape[0], seed=5)
    total = out + expected
    linear.add_to(out, x)
    assert ((out - total).abs() <= most).all()


def magnitudes(codes: torch.Tensor) -> torch.Tensor:
    return codes.float().abs().to(codes.dtype)


@pytest.mark.parametrize("x_dtype", NARROW_TYPES)
@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_16_bit_activations_equal_the_formula(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    weight, x = quantize_channels(random(48, 64) / 8, dtype), random(9, 64, dtype=x_dtype)
    linear = triton_launch.ScaledLinear(weight, None)
    assert linear(x).dtype == x_dtype
    close(linear(x), reference.multiply(x, weight, None).to(x_dtype))


@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_groups_of_tiles_cover_every_row_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tiles of rows in groups of two: the last group is smaller than the others."""
    monkeypatch.setattr(triton_launch, "choose_tiles", lambda num_rows: triton_launch.ScaledTiles(16, 32, 32, 4, 2))
    monkeypatch.setattr(triton_launch, "BAND", 2)
    weight, x = quantize_channels(random(70, 40), dtype), random(75, 40, seed=1)
    result = triton_launch.ScaledLinear(weight, None)(x)
    torch.testing.assert_close(result, reference.multiply(x, weight, None), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_packing_rounds_to_the_nearest_values(dtype: torch.dtype) -> None:
    weight = random(40, 96)
    linear = (triton_launch.pack_w8a8 if dtype == INT8 else triton_launch.pack_fp8)(weight, None)
    assert linear.num_bytes == 40 * 96 + 4 * 40
    ids = torch.tensor([[4, 0], [3, 39]], device=DEVICE)
    rows = linear.gather(ids)
    torch.testing.assert_close(rows, quantize_channels(weight, dtype).dequantize()[ids])
    largest = weight[ids].abs().amax(-1, keepdim=True)
    nearest = largest / 254 if dtype == INT8 else (weight[ids].abs() / 16).clamp(min=1e-9) + largest / 448 / 512
    assert bool(((rows - weight[ids]).abs() <= nearest * 1.001).all())
    assert linear.gather(ids[:0]).shape == (0, 2, 96)


def test_sums_of_the_largest_values_fit_into_int32() -> None:
    width = channels.MAX_INPUTS
    ones = ChannelCodes(torch.full((2, width), 127, dtype=INT8, device=DEVICE), torch.ones(2, device=DEVICE))
    x = torch.full((1, width), 3.0, device=DEVICE)
    result = triton_launch.ScaledLinear(ones, None)(x)
    torch.testing.assert_close(result, torch.full((1, 2), 3.0 * 127 * width, device=DEVICE))
    with pytest.raises(ValueError, match=f"{width + 1} inputs can leave int32"):
        quantize_channels(torch.empty(1, width + 1), INT8)
    assert quantize_channels(torch.ones(1, width + 1), FP8).scales.tolist() == pytest.approx([1 / 448])


def test_without_rows_nothing_is_launched() -> None:
    linear = triton_launch.pack_w8a8(random(8, 32), None)
    assert linear(random(0, 32)).shape == (0, 8)


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    linear = triton_launch.pack_w8a8(random(8, 32), None)
    with pytest.raises(ValueError, match="rows of 32"):
        linear(random(2, 31))
    with pytest.raises(ValueError, match="rows of 32"):
        linear(random(32, 2).t())
    with pytest.raises(ValueError, match="int32"):
        linear(torch.ones(2, 32, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="out is"):
        linear.add_to(random(3, 8), random(2, 32))


def test_a_device_without_fp8_is_refused_with_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A10")
    with pytest.raises(ValueError, match=r"A10 has compute capability 8.6, fp8 needs 8.9 .*; int8 is multiplied there"):
        triton_launch.pack_fp8(random(8, 32), None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert launch.fp8_problem() is None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64, 300])
@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_layers_of_realistic_size_equal_the_formula(dtype: torch.dtype, rows: int) -> None:
    weight = quantize_channels(random(4096, 14336) / 100, dtype)
    x = random(rows, 14336, dtype=torch.bfloat16)
    close(triton_launch.ScaledLinear(weight, None)(x), reference.multiply(x, weight, None).bfloat16())
