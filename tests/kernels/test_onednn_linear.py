"""Linear layers packed for oneDNN equal the plain matmul in any shape and are selected on suitable processors.

If oneDNN has no bfloat16 on this processor, torch's own matmul replaces it; the project's own code (rounding, padding,
bias, sums into a residual) runs in both cases, and oneDNN's packing itself is tested in float32.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagemill_kernels import registry
from pagemill_kernels import torch_ops as activation
from pagemill_kernels import torch_ops as norm
from pagemill_kernels.activation import reference as activation_reference
from pagemill_kernels.cpu import library, processor
from pagemill_kernels.linear import cpu, onednn
from pagemill_kernels.norm import reference as norm_reference
from pagemill_kernels.settings import LEVEL_SETTING

SHAPES = ((96, 64), (1, 32), (65, 37), (331, 288), (7, 1))
ROWS = (*range(1, 20), 31, 32, 33, 63, 64, 127, 129, 200)
needs_native = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that values are within two units in the last of bfloat16's 8 bits, of the value or of the row's largest."""
    assert actual.shape == expected.shape
    allowed = 2**-7 * torch.maximum(expected.abs(), expected.abs().amax(-1, keepdim=True) / 8)
    assert bool(((actual.float() - expected).abs() <= allowed + 1e-3).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_bfloat16_matmuls_equal_torchs_for_any_rows(shape: tuple[int, int], has_bias: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.bfloat16)
    bias = torch.randn(shape[0]) if has_bias else None
    rounded_bias = None if bias is None else bias.bfloat16().float()
    linear = onednn.pack_linear(weight, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1])
        exact = F.linear(x.to(torch.bfloat16).float(), weight.float(), rounded_bias)
        found = linear(x)
        assert found.dtype == torch.bfloat16
        close(found, exact)
        close(linear(x.to(torch.bfloat16)), exact)
        residual = torch.randn(num_rows, shape[0])
        expected = residual + found.float()
        linear.add_to(residual, x)
        assert residual.dtype == torch.float32
        assert torch.equal(residual, expected)


@pytest.mark.skipif(not cpu.can_pack(torch.float32), reason="torch has no oneDNN")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_float32_matmuls_equal_torchs_for_any_rows(shape: tuple[int, int], has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if has_bias else None
    linear = cpu.TorchOneDNNLinear(weight, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1])
        torch.testing.assert_close(linear(x), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_added_rows_change_no_other_row() -> None:
    linear = onednn.pack_linear(torch.randn(24, 32).to(torch.bfloat16), None)
    x = torch.randn(17, 32)
    x[3] = float("nan")
    found = linear(x)
    assert found.shape == (17, 24)
    assert found[3].isnan().all()
    assert found[[0, 2, 4, 16]].isfinite().all()


def test_prompts_of_all_lengths_use_a_few_primitives() -> None:
    computed = {rows: onednn.num_computed_rows(rows) for rows in range(1, 513)}
    assert all(rows <= total < max(rows + 1, rows * 2) for rows, total in computed.items())
    assert len(set(computed.values())) <= 36
    assert [computed[rows] for rows in (1, 16, 17, 129, 256, 257, 512)] == [1, 16, 32, 144, 256, 320, 512]


def test_the_reported_memory_is_that_of_the_packed_layout() -> None:
    weight = torch.randn(331, 288).to(torch.bfloat16)
    assert weight.nbytes <= onednn.pack_linear(weight, None).num_bytes < 2 * weight.nbytes


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights of torch\.float32 are not packed for bfloat16"):
        onednn.pack_linear(torch.randn(4, 4), None)


@needs_native
@pytest.mark.parametrize("size", [64, 129, 7])
def test_a_norm_rounds_for_the_matmul_like_torch(size: int) -> None:
    x, weight = torch.randn(9, size), torch.randn(size)
    rounded = norm.rms_norm_to_bfloat16(x, weight, 1e-5)
    assert torch.equal(rounded, norm.rms_norm(x, weight, 1e-5).to(torch.bfloat16))
    torch.testing.assert_close(rounded.float(), norm_reference.rms_norm(x, weight, 1e-5), rtol=2**-8, atol=1e-6)


@needs_native
def test_a_norm_rounds_ties_to_even_and_keeps_not_a_number() -> None:
    """The scale is 1 because of the chosen eps, weight and sum."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=torch.int32).view(torch.float32)
    weight = bits.repeat(4)
    ones = torch.ones(1, 16)
    assert torch.equal(norm.rms_norm_to_bfloat16(ones, weight, 0.0)[0], weight.to(torch.bfloat16))
    ones[0, 5] = float("nan")
    assert norm.rms_norm_to_bfloat16(ones, weight, 0.0).isnan().all()


@needs_native
@pytest.mark.parametrize("size", [64, 129, 7])
def test_a_gated_activation_in_bfloat16_is_the_rounded_one_of_float32(size: int) -> None:
    gate_up = (torch.randn(9, 2 * size) * 4).to(torch.bfloat16)
    found = activation.silu_and_mul(gate_up)
    assert torch.equal(found, activation.silu_and_mul(gate_up.float()).to(torch.bfloat16))
    close(found, activation_reference.silu_and_mul(gate_up.float()))


@needs_native
@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "compiled", "backend", "reported"),
    [
        (True, True, True, "cpu_onednn", "native kernels, oneDNN with AMX"),
        (False, True, True, "cpu_bfloat16", "native kernels, products with AVX512_BF16"),
        (False, True, False, "cpu_onednn", "native kernels, oneDNN with AVX512_BF16"),
        (False, False, False, "cpu_native", "native kernels"),
    ],
)
def test_the_processor_determines_the_arithmetic_which_is_reported(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx512_bf16: bool, compiled: bool, backend: str, reported: str
) -> None:
    """`compiled` is whether the native bfloat16 matmul exists, which a compiler may not support."""
    monkeypatch.delenv(LEVEL_SETTING, raising=False)
    monkeypatch.setattr(library, "has_bfloat16", lambda: compiled)
    monkeypatch.setattr(cpu, "can_pack", lambda dtype: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    flags = {"amx_tile", "amx_bf16"} if amx else set()
    monkeypatch.setattr(processor, "flags", lambda: flags | ({"avx512_bf16"} if avx512_bf16 else set()))
    assert registry.cpu_backend("bfloat16", 64, 16, 3) == (backend, reported)
    assert registry.cpu_backend("float32", 64, 16, 3) == ("cpu_native", "native kernels")
    assert registry.cpu_backend("bfloat16", 64, 16, 3, True) == ("cpu_native", "native kernels")


@needs_native
@pytest.mark.parametrize(
    ("amx", "slower", "backend", "reported"),
    [
        (False, True, "cpu_native", "native kernels, products in float32"),
        (False, False, "cpu_bfloat16", "native kernels, products with AVX512_BF16"),
        (True, True, "cpu_onednn", "native kernels, oneDNN with AMX"),
    ],
)
def test_only_prompts_are_multiplied_in_the_type_that_is_faster_for_many_rows(
    monkeypatch: pytest.MonkeyPatch, amx: bool, slower: bool, backend: str, reported: str
) -> None:
    monkeypatch.setattr(library, "has_bfloat16", lambda: True)
    monkeypatch.setattr(registry, "bfloat16_unit", lambda: "AMX" if amx else "AVX512_BF16")
    monkeypatch.setattr(processor, "has_amx", lambda: amx)
    monkeypatch.setattr(processor, "multiplies_floats_faster", lambda: slower)
    assert registry.cpu_backend("bfloat16", 64, 16, 3, prompts_alone=True) == (backend, reported)
    assert registry.cpu_backend("bfloat16", 64, 16, 3)[0] != "cpu_native"


@needs_native
def test_without_onednns_bfloat16_the_native_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "has_bfloat16", lambda: False)
    monkeypatch.setattr(cpu, "can_pack", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(processor, "has_amx", lambda: True)
    assert registry.cpu_backend("bfloat16", 64, 16, 3)[0] == "cpu_native"
