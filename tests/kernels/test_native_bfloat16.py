"""Matmuls in bfloat16 and, for few rows, in 16-bit integers, on processors with AVX512_BF16 and VNNI."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from code_kinds import KINDS, check_threads_change_nothing, group_codes, values_of

from pagemill_kernels import torch_ops as native
from pagemill_kernels.cpu import library, processor
from pagemill_kernels.linear import groups
from pagemill_kernels.linear import native as packing
from pagemill_kernels.linear.native import BFLOAT16_ROWS, FLOAT32_ROWS, NativeLinear

pytestmark = pytest.mark.skipif(
    not library.has_bfloat16(), reason="no bfloat16 matmul on this processor (AVX512_BF16 and VNNI)"
)

FORMATS = ("pairs", *KINDS)
SHAPES = ((16, 32), (48, 576), (20, 64), (1, 32), (331, 288), (64, 1536), (33, 2080))
PRODUCTS = {"bfloat16": 1, "integers": 1 << 30}
"""The number of rows from which quantized weights are multiplied in bfloat16."""

Packer = Callable[..., tuple[NativeLinear, torch.Tensor]]


@pytest.fixture(params=PRODUCTS)
def pack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Packer:
    """Return a function that packs a weight for one kind of matmul and returns it with its values."""
    monkeypatch.setattr(packing, "BFLOAT16_ROWS", PRODUCTS[request.param])
    monkeypatch.setattr(processor, "multiplies_integers_faster", lambda: False)
    monkeypatch.setattr(processor, "multiplies_floats_faster", lambda: False)
    return packed


def random_codes(kind: str, out_features: int, in_features: int) -> groups.GroupCodes:
    bits, group_size, has_offsets = KINDS[kind]
    shape, per_group = (out_features, in_features), (out_features, in_features // group_size)
    offsets = torch.randn(per_group) * 0.3 if has_offsets else None
    if bits == 4:
        codes = torch.randint(0, 16, shape, dtype=torch.uint8)
        return group_codes(4, codes, torch.rand(per_group) * 0.1, offsets)
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    return group_codes(8, codes, torch.rand(per_group) * 0.01, offsets)


def packed(
    format: str, out_features: int, in_features: int, bias: torch.Tensor | None = None
) -> tuple[NativeLinear, torch.Tensor]:
    if format == "pairs":
        weight = torch.randn(out_features, in_features).to(torch.bfloat16)
        return native.pack_pairs(weight, bias), weight.float()
    codes = random_codes(format, out_features, in_features)
    return native.pack_codes_for_bfloat16(codes, bias), values_of(codes)


def close(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | float = 0.0) -> None:
    """Check that both factors are off by at most half a unit in the last of bfloat16's 8 bits; sums are float32."""
    expected = x.double() @ weight.double().T + added
    allowed = (2**-8 + 1e-4) * (x.abs().double() @ weight.abs().double().T) + 1e-4
    assert actual.shape == expected.shape
    assert bool(((actual - expected).abs() <= allowed).all())
    spread = (x.square().double() @ weight.square().double().T).sqrt()
    assert float((actual - expected).norm()) <= 2**-7 * float(spread.norm()) + 1e-4


@pytest.mark.sample("*-shape1-*", "*-shape4-*", "*-pairs", "*-codes4")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_matmul_is_exact_within_the_rounding_of_bfloat16(pack: Packer, format: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    bias = torch.randn(shape[0])
    linear, weight = pack(format, *shape, bias)
    x = torch.randn(300, shape[1])
    for rows in (*range(1, 71), 97, 128, 129, 300):
        close(linear(x[:rows]), x[:rows], weight, bias)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("out_features", [1, 15, 16, 17, 47, 48, 49, 63, 65, 100])
def test_partial_panels_write_nothing_beyond_their_columns(pack: Packer, format: str, out_features: int) -> None:
    torch.manual_seed(0)
    linear, weight = pack(format, out_features, 96)
    for rows in (1, 3, 8, 9, 21):
        x = torch.randn(rows, 96)
        wide = torch.full((rows + 2, out_features), 7.0)
        wide[1:-1] = 0
        linear.add_to(wide[1:-1], x)
        close(wide[1:-1], x, weight)
        assert bool((wide[[0, -1]] == 7).all())


@pytest.mark.parametrize("format", FORMATS)
def test_the_result_can_be_added_to_a_residual(pack: Packer, format: str) -> None:
    torch.manual_seed(0)
    bias = torch.randn(40)
    linear, weight = pack(format, 40, 2112, bias)
    for rows in (1, 5, 70):
        x, residual = torch.randn(rows, 2112), torch.randn(rows, 40)
        found = residual.clone()
        linear.add_to(found, x)
        close(found, x, weight, residual + bias)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_may_be_slices_of_wider_ones(pack: Packer, format: str) -> None:
    linear, _ = pack(format, 24, 32)
    wide = torch.randn(6, 100)
    assert torch.equal(linear(wide[:, 10:42]), linear(wide[:, 10:42].contiguous()))


@pytest.mark.parametrize("in_features", [1, 2, 37, 575, 2049])
def test_float_weights_may_have_any_width(in_features: int) -> None:
    torch.manual_seed(0)
    linear, weight = packed("pairs", 18, in_features)
    for rows in (1, 9, 70):
        x = torch.randn(rows, in_features)
        close(linear(x), x, weight)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(48, 576), (331, 1536)])
def test_with_one_kind_of_matmul_a_row_does_not_depend_on_the_number_of_rows(
    pack: Packer, format: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    linear, _ = pack(format, *shape, torch.randn(shape[0]))
    x, residual = torch.randn(300, shape[1]), torch.randn(300, shape[0])
    together, added = linear(x), residual.clone()
    linear.add_to(added, x)
    for rows in (1, 2, 3, 4, 5, 8, 9, 70, 130):
        assert torch.equal(linear(x[:rows]), together[:rows])
        assert torch.equal(linear(x[-rows:]), together[-rows:])
        alone = residual[:rows].clone()
        linear.add_to(alone, x[:rows])
        assert torch.equal(alone, added[:rows])


@pytest.mark.parametrize("bits", [4, 8])
def test_few_rows_are_multiplied_in_integers_and_many_in_bfloat16_if_that_is_faster(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16-bit integers are a hundred times as exact."""
    torch.manual_seed(0)
    monkeypatch.setattr(processor, "multiplies_integers_faster", lambda: False)
    first = BFLOAT16_ROWS
    linear, weight = packed(f"codes{bits}", 256, 576)
    x = torch.randn(first, 576)
    expected = x.double() @ weight.double().T
    few, many = linear(x[:-1]) - expected[:-1], linear(x) - expected
    assert 0 < few.norm() < 1e-4 * expected.norm()
    assert 1e-3 * expected.norm() < many.norm() < 1e-2 * expected.norm()
    monkeypatch.setattr(processor, "multiplies_integers_faster", lambda: True)
    torch.manual_seed(0)
    linear, weight = packed(f"codes{bits}", 256, 576)
    assert (linear(x) - x.double() @ weight.double().T).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(("faster", "first"), [(True, FLOAT32_ROWS), (False, None)], ids=["float32", "bfloat16"])
def test_many_rows_are_multiplied_by_bfloat16_weights_in_float32_if_that_is_faster(
    faster: bool, first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(processor, "multiplies_floats_faster", lambda: faster)
    linear, weight = packed("pairs", 256, 576)
    x = torch.randn(FLOAT32_ROWS, 576)
    expected = x.double() @ weight.double().T
    few, many = linear(x[:-1]) - expected[:-1], linear(x) - expected
    assert 1e-3 * expected.norm() < few.norm() < 1e-2 * expected.norm()
    assert (many.norm() < 1e-6 * expected.norm()) == (first == FLOAT32_ROWS)


@pytest.mark.parametrize("out_features", [1, 16, 17, 49, 100])
@pytest.mark.parametrize("in_features", [1, 2, 37, 768, 769, 2049])
def test_pairs_are_multiplied_in_float32(out_features: int, in_features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(processor, "multiplies_floats_faster", lambda: True)
    bias = torch.randn(out_features)
    linear, weight = packed("pairs", out_features, in_features, bias)
    for rows in (FLOAT32_ROWS, FLOAT32_ROWS + 1, 193):
        x, residual = torch.randn(rows, in_features), torch.randn(rows, out_features)
        expected = (x.double() @ weight.double().T + bias).float()
        tolerance = 2e-7 * in_features + 1e-5
        torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=tolerance)
        found = residual.clone()
        linear.add_to(found, x)
        torch.testing.assert_close(found, residual + expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_values_do_not_overflow(pack: Packer, bits: int) -> None:
    most = torch.full((16, 64), 15, dtype=torch.uint8) if bits == 4 else torch.full((16, 64), -128, dtype=torch.int8)
    offsets = torch.zeros(16, 2) if bits == 4 else None
    linear = native.pack_codes_for_bfloat16(group_codes(4 if bits == 4 else 8, most, torch.ones(16, 2), offsets), None)
    code = float(most[0, 0])
    for value in (1e30, -1e30):
        x = torch.full((5, 64), value)
        torch.testing.assert_close(linear(x), torch.full((5, 16), value * code * 64), rtol=2**-8, atol=0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_remain_so_in_their_row(pack: Packer, format: str, value: float) -> None:
    linear, _ = pack(format, 48, 64)
    x = torch.randn(6, 64)
    expected = linear(x)
    x[2, 40] = value
    result = linear(x)
    kept = [0, 1, 3, 4, 5]
    assert not result[2].isfinite().any()
    assert torch.equal(result[kept], expected[kept])


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_the_weight_are_gathered_exactly(format: str) -> None:
    linear, weight = packed(format, 50, 64)
    ids = torch.tensor([[0, 49], [17, 17]])
    torch.testing.assert_close(linear.gather(ids), weight[ids], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("format", FORMATS)
def test_one_thread_and_two_give_the_same_bits(pack: Packer, format: str) -> None:
    linear, _ = pack(format, 331, 576)
    check_threads_change_nothing(linear)


@pytest.mark.parametrize(("bits", "stored_offsets"), [(4, True), (4, False), (8, False)])
def test_blocks_of_a_file_are_packed_like_their_values(pack: Packer, bits: int, stored_offsets: bool) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (50, 3, 2 + 2 * stored_offsets + 4 * bits), dtype=torch.uint8)
    blocks[..., : 2 + 2 * stored_offsets] = torch.rand(50, 3, 1 + stored_offsets).half().view(torch.uint8)
    stored = groups.CodeBlocks(4 if bits == 4 else 8, stored_offsets, blocks.numpy())
    linear = native.pack_blocks_for_bfloat16(stored, None)
    floats = native.pack_blocks(stored, None)
    ids = torch.arange(50)
    assert torch.equal(linear.gather(ids), floats.gather(ids))
    x = torch.randn(9, 96)
    close(linear(x), x, floats.gather(ids))
