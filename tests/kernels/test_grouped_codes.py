"""Quantized groups of several runs of 32 inputs, with permuted columns, 8-bit floats or a table of values.

Checkpoints of other projects contain these formats in addition to those of GGUF.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from code_kinds import group_codes, values_of
from torch import Tensor

from pagemill_kernels import torch_ops as native
from pagemill_kernels.cpu import library, processor
from pagemill_kernels.linear.groups import GroupCodes, e4m3_values, stack
from pagemill_kernels.torch_ops import TorchLinear

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")

Packer = Callable[[GroupCodes, Tensor | None], TorchLinear]
PACKERS: dict[str, Packer] = {
    "floats": native.pack_codes,
    "integers": native.pack_codes_for_dots,
    "bfloat16": native.pack_codes_for_bfloat16,
}
KINDS = ("4 bits", "8 bits", "8 bits with offsets")
FLOATS = ("floats", "table")
TABLE = torch.tensor([-1.0, -0.7, -0.53, -0.4, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0])
ROWS = (1, 2, 3, 4, 5, 20, 200)
OUT, IN = 50, 1536


@pytest.fixture(autouse=True)
def bfloat16_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select all kernels, whatever the processor, so that each of them is tested."""
    monkeypatch.setattr(processor, "multiplies_floats_faster", lambda: False)


def drawn(kind: str, group_size: int, out: int = OUT, size: int = IN) -> GroupCodes:
    torch.manual_seed(4)
    groups = (out, size // group_size)
    scales = torch.rand(groups) * 0.01 + 0.001
    if kind == "floats":
        floats = (torch.randn(out, size) * 90).to(torch.float8_e4m3fn)
        return group_codes(8, floats.view(torch.uint8), scales, None, is_float=True)
    if kind == "table":
        return group_codes(4, torch.randint(0, 16, (out, size), dtype=torch.uint8), scales, None, table=TABLE)
    offsets = None if kind == "8 bits" else torch.randn(groups) * 0.1
    if kind == "4 bits":
        return group_codes(4, torch.randint(0, 16, (out, size), dtype=torch.uint8), scales, offsets)
    return group_codes(8, torch.randint(-128, 128, (out, size), dtype=torch.int8), scales, offsets)


def in_runs(codes: GroupCodes) -> GroupCodes:
    """Return the same values with a scale for every 32 inputs."""
    times = codes.group_size // 32
    offsets = None if codes.offsets is None else codes.offsets.repeat(times, 1)
    return replace(codes, scales=codes.scales.repeat(times, 1), offsets=offsets)


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("group_size", [64, 128, IN])
@pytest.mark.parametrize("kind", [*KINDS, *FLOATS])
def test_a_scale_for_several_runs_gives_the_bits_of_one_scale_for_each(
    kind: str, group_size: int, pack: Packer
) -> None:
    codes = drawn(kind, group_size)
    large, small = pack(codes, None), pack(in_runs(codes), None)
    for rows in ROWS:
        x = torch.randn(rows, IN)
        assert torch.equal(large(x), small(x))
    ids = torch.tensor([0, OUT - 1, 17])
    torch.testing.assert_close(large.gather(ids), values_of(codes)[ids], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("kind", [*KINDS, *FLOATS])
def test_permuted_columns_are_multiplied_by_their_own_inputs(kind: str, pack: Packer) -> None:
    plain = drawn(kind, 128)
    order = torch.randperm(IN)
    ordered = replace(plain, input_order=order.numpy())
    torch.testing.assert_close(values_of(ordered)[:, order], values_of(plain))
    bias = torch.randn(OUT)
    linear, reference = pack(ordered, bias), pack(plain, bias)
    for rows in (*ROWS, 800):
        x, residual = torch.randn(rows, IN), torch.randn(rows, OUT)
        assert torch.equal(linear(x), reference(x[:, order]))
        added, expected = residual.clone(), residual.clone()
        linear.add_to(added, x)
        reference.add_to(expected, x[:, order])
        assert torch.equal(added, expected)
    ids = torch.tensor([[3, 49], [0, 3]])
    torch.testing.assert_close(linear.gather(ids), values_of(ordered)[ids], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("group_size", [32, 64, 128, IN])
def test_8_bit_floats_are_multiplied_as_their_values(group_size: int, kind: str) -> None:
    codes = drawn(kind, group_size)
    weight = values_of(codes).double()
    linear, rounding = native.pack_codes(codes, None), native.pack_codes_for_bfloat16(codes, None)
    for rows in ROWS:
        x = torch.randn(rows, IN)
        expected = x.double() @ weight.T
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=1e-4)
        allowed = 2**-7 * (x.abs().double() @ weight.abs().T) + 1e-4
        assert bool(((rounding(x) - expected).abs() <= allowed).all())


@pytest.mark.parametrize("kind", FLOATS)
def test_8_bit_floats_are_multiplied_in_float32_if_that_is_faster(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_floats_faster", lambda: True)
    codes = drawn(kind, 64)
    linear, exact = native.pack_codes_for_bfloat16(codes, None), native.pack_codes(codes, None)
    for rows in ROWS:
        x = torch.randn(rows, IN)
        assert torch.equal(linear(x), exact(x))


def test_every_8_bit_float_has_its_value() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 127) != 127].repeat(2)[:480]
    every = every.view(15, 32)
    linear = native.pack_codes(group_codes(8, every, torch.ones(15, 1), None, is_float=True), None)
    values = every.view(torch.float8_e4m3fn).float()
    assert torch.equal(linear.gather(torch.arange(15)), values)
    assert torch.equal(linear(torch.eye(32)), values.T)


def test_every_code_of_a_table_has_its_value() -> None:
    """Each code is in every position of a byte and of a panel; rows are computed alone and in tiles."""
    codes = (torch.arange(32)[None] + torch.arange(33)[:, None]).remainder(16).to(torch.uint8)
    linear = native.pack_codes(group_codes(4, codes, torch.ones(33, 1), None, table=TABLE), None)
    values = TABLE[codes.long()]
    assert torch.equal(linear.gather(torch.arange(33)), values)
    assert torch.equal(linear(torch.eye(32)), values.T)
    assert torch.equal(torch.cat([linear(row[None]) for row in torch.eye(32)]), values.T)


@pytest.mark.parametrize("kind", FLOATS)
def test_a_row_does_not_depend_on_the_number_of_rows(kind: str) -> None:
    linear = native.pack_codes(drawn(kind, 64), None)
    x = torch.randn(40, IN)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows])[:1], linear(x[:1]))


def test_values_of_8_bit_floats_equal_torchs() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(torch.from_numpy(e4m3_values()), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "group_size", "bits"), [("4 bits", 128, 4.5), ("8 bits", IN, 8 + 32 / IN), ("floats", 128, 8.25)]
)
def test_larger_groups_need_less_memory(kind: str, group_size: int, bits: float) -> None:
    codes = drawn(kind, group_size, out=64)
    assert native.pack_codes(codes, None).num_bytes == 64 * IN * bits / 8
    ordered = replace(codes, input_order=torch.randperm(IN).numpy())
    assert native.pack_codes(ordered, None).num_bytes == 64 * IN * bits / 8 + 4 * IN


def test_parts_with_a_common_kind_are_stacked() -> None:
    order = torch.randperm(IN).numpy()
    parts = [replace(drawn("4 bits", size, out=8), input_order=order) for size in (128, 96)]
    stacked = stack(parts)
    assert stacked is not None
    assert stacked.group_size == 32
    assert torch.equal(values_of(stacked), torch.cat([values_of(part) for part in parts]))
    floats = [drawn("floats", size, out=8) for size in (128, IN)]
    both = stack(floats)
    assert both is not None
    assert torch.equal(values_of(both), torch.cat([values_of(part) for part in floats]))
    assert stack([parts[0], drawn("4 bits", 128, out=8)]) is None
    assert stack([parts[0], replace(parts[1], input_order=order[::-1])]) is None
    assert stack([drawn("8 bits", 128, out=8), floats[0]]) is None


def test_parts_of_one_table_are_stacked() -> None:
    parts = [drawn("table", size, out=8) for size in (64, 96)]
    stacked = stack(parts)
    assert stacked is not None
    assert (stacked.bits, stacked.group_size) == (4, 32)
    assert torch.equal(values_of(stacked), torch.cat([values_of(part) for part in parts]))
    assert stack([parts[0], replace(parts[1], table=(2 * TABLE).numpy())]) is None
    assert stack([parts[0], drawn("4 bits", 64, out=8)]) is None
    assert native.pack_codes(drawn("table", 64, out=64), None).num_bytes == 64 * IN * 4.5 / 8 + TABLE.nbytes
