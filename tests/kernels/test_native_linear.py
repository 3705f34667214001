"""Native linear layers: equal to the plain product, for every weight format and any shape."""

from __future__ import annotations

import pytest
import torch

from pagemill_kernels.cpu import library
from pagemill_kernels.linear import groups, native

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.why_absent()}")

ROWS = (1, 2, 3, 4, 5, 7, 64, 97, 200)
SHAPES = ((16, 32), (48, 576), (20, 64), (1, 32), (331, 288), (64, 1536))


def random_codes(bits: int, out_features: int, in_features: int) -> groups.GroupCodes:
    shape, per_group = (out_features, in_features), (out_features, in_features // 32)
    if bits == 4:
        codes = torch.randint(0, 16, shape, dtype=torch.uint8)
        return groups.GroupCodes(4, codes, torch.rand(per_group) * 0.1, torch.randn(per_group) * 0.3)
    return groups.GroupCodes(8, torch.randint(-128, 128, shape, dtype=torch.int8), torch.rand(per_group) * 0.01, None)


def packed(format: str, out_features: int, in_features: int) -> tuple[native.NativeLinear, torch.Tensor]:
    bias = torch.randn(out_features)
    if format in ("codes4", "codes8"):
        codes = random_codes(int(format[-1]), out_features, in_features)
        return native.pack_codes(codes, bias), torch.cat([codes.dequantize(), bias[:, None]], 1)
    weight = torch.randn(out_features, in_features).to(getattr(torch, format))
    return native.pack_linear(weight, bias), torch.cat([weight.float(), bias[:, None]], 1)


@pytest.mark.parametrize("format", ["float32", "bfloat16", "codes4", "codes8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_product_in_double_precision(format: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear, reference = packed(format, *shape)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        expected = torch.cat([x, torch.ones(rows, 1)], 1).double() @ reference.double().T
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=2e-4)


def test_plain_weights_need_no_whole_groups() -> None:
    weight = torch.randn(18, 37)
    x = torch.randn(9, 37)
    torch.testing.assert_close(native.pack_linear(weight, None)(x), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_adds_to_a_residual() -> None:
    linear, reference = packed("codes4", 40, 64)
    x, residual = torch.randn(5, 64), torch.randn(5, 40)
    expected = residual + x @ reference[:, :-1].T + reference[:, -1]
    linear.add_to(residual, x)
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-4)


def test_reads_rows_that_are_slices_of_wider_ones() -> None:
    linear, reference = packed("float32", 24, 32)
    wide = torch.randn(6, 100)
    expected = wide[:, 10:42] @ reference[:, :-1].T + reference[:, -1]
    torch.testing.assert_close(linear(wide[:, 10:42]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["float32", "bfloat16", "codes4", "codes8"])
def test_gathers_rows_of_the_weight_exactly(format: str) -> None:
    linear, reference = packed(format, 50, 64)
    ids = torch.tensor([[0, 49], [17, 17]])
    torch.testing.assert_close(linear.gather(ids), reference[ids, :-1], rtol=1e-6, atol=1e-7)


def test_codes_take_a_fraction_of_the_memory() -> None:
    codes = random_codes(4, 576, 1536)
    assert native.pack_codes(codes, None).num_bytes == 576 * 1536 * 6 // 8


def test_a_wrong_width_is_refused() -> None:
    linear, _ = packed("float32", 16, 32)
    with pytest.raises(ValueError, match="float32 \\[rows, 32\\] is needed"):
        linear(torch.randn(2, 33))


def test_parts_of_one_kind_are_stacked_and_others_are_not() -> None:
    four, eight = random_codes(4, 8, 64), random_codes(8, 8, 64)
    stacked = groups.stack([four, four])
    assert stacked is not None
    torch.testing.assert_close(stacked.dequantize(), torch.cat([four.dequantize()] * 2))
    assert groups.stack([four, eight]) is None
