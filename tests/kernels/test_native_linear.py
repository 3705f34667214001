"""Native linear layers equal the plain matmul for every weight format and any shape."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from code_kinds import KINDS, group_codes, values_of

from pagemill_kernels import torch_ops as native
from pagemill_kernels.cpu import library
from pagemill_kernels.linear import groups

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")

ROWS = (1, 2, 3, 4, 5, 7, 64, 97, 200)
FORMATS = ("float32", "bfloat16", *KINDS)
SHAPES = ((16, 32), (48, 576), (20, 64), (1, 32), (331, 288), (64, 1536))


def random_codes(kind: str, out_features: int, in_features: int) -> groups.GroupCodes:
    bits, group_size, has_offsets = KINDS[kind]
    shape, per_group = (out_features, in_features), (out_features, in_features // group_size)
    if bits == 4:
        codes = torch.randint(0, 16, shape, dtype=torch.uint8)
        return group_codes(4, codes, torch.rand(per_group) * 0.1, torch.randn(per_group) * 0.3)
    offsets = torch.randn(per_group) * 0.3 if has_offsets else None
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    return group_codes(8, codes, torch.rand(per_group) * 0.01, offsets)


def packed(format: str, out_features: int, in_features: int) -> tuple[native.TorchLinear, torch.Tensor]:
    bias = torch.randn(out_features)
    if format in KINDS:
        codes = random_codes(format, out_features, in_features)
        return native.pack_codes(codes, bias), torch.cat([values_of(codes), bias[:, None]], 1)
    weight = torch.randn(out_features, in_features).to(getattr(torch, format))
    return native.pack_linear(weight, bias), torch.cat([weight.float(), bias[:, None]], 1)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_matmul_equals_that_in_double_precision(format: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear, reference = packed(format, *shape)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        expected = torch.cat([x, torch.ones(rows, 1)], 1).double() @ reference.double().T
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=2e-4)


def test_float_weights_may_have_any_width() -> None:
    weight = torch.randn(18, 37)
    x = torch.randn(9, 37)
    torch.testing.assert_close(native.pack_linear(weight, None)(x), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_the_result_can_be_added_to_a_residual() -> None:
    linear, reference = packed("codes4", 40, 64)
    x, residual = torch.randn(5, 64), torch.randn(5, 40)
    expected = residual + x @ reference[:, :-1].T + reference[:, -1]
    linear.add_to(residual, x)
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-4)


def test_rows_may_be_slices_of_wider_ones() -> None:
    linear, reference = packed("float32", 24, 32)
    wide = torch.randn(6, 100)
    expected = wide[:, 10:42] @ reference[:, :-1].T + reference[:, -1]
    torch.testing.assert_close(linear(wide[:, 10:42]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_the_weight_are_gathered_exactly(format: str) -> None:
    linear, reference = packed(format, 50, 64)
    ids = torch.tensor([[0, 49], [17, 17]])
    torch.testing.assert_close(linear.gather(ids), reference[ids, :-1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(48, 576), (331, 1536)])
def test_a_row_does_not_depend_on_the_number_of_rows(format: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear, _ = packed(format, *shape)
    x, residual = torch.randn(200, shape[1]), torch.randn(200, shape[0])
    together, added = linear(x), residual.clone()
    linear.add_to(added, x)
    for rows in ROWS:
        first, last = linear(x[:rows]), linear(x[-rows:])
        assert torch.equal(first, together[:rows])
        assert torch.equal(last, together[-rows:])
        alone = residual[:rows].clone()
        linear.add_to(alone, x[:rows])
        assert torch.equal(alone, added[:rows])


@pytest.mark.parametrize(("kind", "bits"), [("codes4", 6), ("codes8", 9), ("codes8 groups of 16", 10)])
def test_quantized_weights_need_a_fraction_of_the_memory(kind: str, bits: int) -> None:
    codes = random_codes(kind, 576, 1536)
    assert native.pack_codes(codes, None).num_bytes == 576 * 1536 * bits // 8


def test_a_wrong_width_is_refused() -> None:
    linear, _ = packed("float32", 16, 32)
    with pytest.raises(ValueError, match="float32 \\[rows, 32\\] is needed"):
        linear(torch.randn(2, 33))


@pytest.mark.parametrize("kinds", [("codes4", "codes4"), ("codes8", "codes8"), ("codes4", "codes8"), tuple(KINDS)])
def test_parts_of_any_kinds_are_stacked_with_unchanged_values(kinds: tuple[str, ...]) -> None:
    parts = [random_codes(kind, 8, 64) for kind in kinds]
    stacked = groups.stack(parts)
    expected = torch.cat([values_of(part) for part in parts])
    assert torch.equal(values_of(stacked), expected)
    assert stacked.bits == (4 if set(kinds) == {"codes4"} else 8)
    x = torch.randn(5, 64)
    torch.testing.assert_close(native.pack_codes(stacked, None)(x), x @ expected.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "stored_offsets", "block_bytes"), [(4, True, 18), (8, False, 36), (8, True, 36)])
def test_blocks_of_an_unsupported_shape_are_refused(
    bits: Literal[4, 8], stored_offsets: bool, block_bytes: int
) -> None:
    data = torch.zeros(16, 2, block_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{block_bytes} bytes are no block of {bits}-bit codes that is packed"):
        native.pack_blocks(groups.CodeBlocks(bits, stored_offsets, data.numpy()), None)


def test_quantized_weights_of_an_unsupported_shape_are_refused() -> None:
    codes = torch.zeros(16, 48, dtype=torch.int8)
    with pytest.raises(ValueError, match="8-bit codes of 48 inputs in groups of 16 are not packed"):
        native.pack_codes(group_codes(8, codes, torch.ones(16, 3), None), None)
