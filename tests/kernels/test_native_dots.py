"""Integer matmuls: 4-bit weights times activations rounded to 16 bits in groups of 32."""

from __future__ import annotations

import pytest
import torch
from code_kinds import check_threads_change_nothing, group_codes, values_of

from pagemill_kernels import torch_ops as native
from pagemill_kernels.cpu import library
from pagemill_kernels.linear import groups

pytestmark = pytest.mark.skipif(not library.has_dots(), reason="no integer matmul on this processor")

ROWS = (1, 2, 3, 4, 5, 7, 64, 97, 300)
SHAPES = ((16, 32), (48, 576), (20, 64), (1, 32), (331, 288), (64, 1536))


def random_codes(out_features: int, in_features: int) -> groups.GroupCodes:
    shape, per_group = (out_features, in_features), (out_features, in_features // 32)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    return group_codes(4, codes, torch.rand(per_group) * 0.1, torch.randn(per_group) * 0.3)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return the rounded activations: in each group of 32, a scale times integers up to 127 * 256."""
    grouped = x.reshape(len(x), -1, 32)
    most = grouped.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, 32512 / most, 0)
    return ((grouped * inverse).round() * (most / 32512)).reshape(x.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_matmul_equals_that_of_rounded_activations(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    codes, bias = random_codes(*shape), torch.randn(shape[0])
    linear = native.pack_codes_for_dots(codes, bias)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        expected = rounded(x).double() @ values_of(codes).double().T + bias
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=2e-4)


def test_the_largest_values_do_not_overflow() -> None:
    codes = group_codes(4, torch.full((16, 64), 15, dtype=torch.uint8), torch.ones(16, 2), torch.zeros(16, 2))
    linear = native.pack_codes_for_dots(codes, None)
    for value in (1e30, -1e30):
        x = torch.full((5, 64), value)
        torch.testing.assert_close(linear(x), torch.full((5, 16), value * 15 * 64), rtol=1e-5, atol=0)


def test_the_rounding_error_is_tiny() -> None:
    torch.manual_seed(0)
    codes = random_codes(256, 576)
    x = torch.randn(40, 576)
    exact = native.pack_codes(codes, None)(x)
    error = native.pack_codes_for_dots(codes, None)(x) - exact
    assert 0 < error.norm() < 5e-5 * exact.norm()


@pytest.mark.parametrize("shape", [(48, 576), (331, 1536)])
def test_a_row_does_not_depend_on_the_number_of_rows(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = native.pack_codes_for_dots(random_codes(*shape), torch.randn(shape[0]))
    x, residual = torch.randn(300, shape[1]), torch.randn(300, shape[0])
    together, added = linear(x), residual.clone()
    linear.add_to(added, x)
    torch.testing.assert_close(added, residual + together, rtol=1e-4, atol=1e-4)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), together[:rows])
        assert torch.equal(linear(x[-rows:]), together[-rows:])
        alone = residual[:rows].clone()
        linear.add_to(alone, x[:rows])
        assert torch.equal(alone, added[:rows])


def test_rows_may_be_slices_of_wider_ones() -> None:
    linear = native.pack_codes_for_dots(random_codes(24, 32), None)
    wide = torch.randn(6, 100)
    assert torch.equal(linear(wide[:, 10:42]), linear(wide[:, 10:42].contiguous()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_remain_so_in_their_row(value: float) -> None:
    linear = native.pack_codes_for_dots(random_codes(48, 64), None)
    x = torch.randn(6, 64)
    expected = linear(x)
    x[2, 40] = value
    result = linear(x)
    assert not result[2].isfinite().any()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(result[kept], expected[kept])


def test_zeros_remain_zero() -> None:
    linear = native.pack_codes_for_dots(random_codes(48, 64), None)
    assert torch.equal(linear(torch.zeros(3, 64)), torch.zeros(3, 48))


def test_rows_of_the_weight_are_gathered_exactly() -> None:
    codes = random_codes(50, 64)
    ids = torch.tensor([[0, 49], [17, 17]])
    gathered = native.pack_codes_for_dots(codes, None).gather(ids)
    torch.testing.assert_close(gathered, values_of(codes)[ids], rtol=1e-6, atol=1e-7)


def test_activations_of_8_bit_weights_are_not_rounded() -> None:
    codes = group_codes(8, torch.randint(-128, 128, (48, 64), dtype=torch.int8), torch.rand(48, 2), None)
    x = torch.randn(3, 64)
    assert torch.equal(native.pack_codes_for_dots(codes, None)(x), native.pack_codes(codes, None)(x))


def test_one_thread_and_two_give_the_same_bits() -> None:
    check_threads_change_nothing(native.pack_codes_for_dots(random_codes(331, 576), None))
