"""Native and Triton kernels of experts equal the reference for any shapes, formats and routing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from code_kinds import values_of
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton_device import DEVICE, HAS_GPU

from pagemill_kernels import torch_ops as native
from pagemill_kernels import torch_ops as native_linear
from pagemill_kernels.cpu import library
from pagemill_kernels.cpu.launch import set_num_threads
from pagemill_kernels.experts import reference, triton_launch
from pagemill_kernels.experts.parts import ExpertParts, FusedExperts, Gate, Gating
from pagemill_kernels.gpu import launch
from pagemill_kernels.linear import reference as plain_linear
from pagemill_kernels.linear import triton_launch as triton_linear
from pagemill_kernels.linear.packed import PackedLinear
from pagemill_kernels.linear.quantize import quantize

needs_native = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
SILU, CLAMPED = Gate("silu"), Gate("gelu_quick", 0.7)
SHAPES = [(1, 32, 32, 1, 1), (5, 64, 96, 7, 2), (70, 32, 160, 3, 3), (40, 96, 32, 16, 1), (300, 64, 64, 5, 4)]
"""Numbers of tokens, hidden size, intermediate size, number of experts, experts per token."""
FORMATS = ["float32", "bfloat16", "int8", "int4"]
Pack = Callable[[Tensor, Tensor | None], PackedLinear]


def packers(module: object, format: str) -> Pack:
    if format in ("int8", "int4"):
        bits = 8 if format == "int8" else 4
        return lambda weight, bias: module.pack_codes(quantize(weight.cpu().numpy(), bits), bias)  # type: ignore[attr-defined]
    dtype = getattr(torch, format)
    return lambda weight, bias: module.pack_linear(weight.to(dtype), bias)  # type: ignore[attr-defined]


def stored(weight: Tensor, format: str) -> Tensor:
    """Return the values that the format represents."""
    if format in ("int8", "int4"):
        return values_of(quantize(weight.cpu().numpy(), 8 if format == "int8" else 4))
    return weight.to(getattr(torch, format)).float()


class Case:
    """The same experts in the reference and in another implementation."""

    def __init__(self, shape: tuple[int, int, int, int, int], format: str, pack: Pack, biased: bool) -> None:
        self.tokens, size, inner, experts, self.top_k = shape
        generator = torch.Generator().manual_seed(sum(shape))
        self.x = torch.randn(self.tokens, size, generator=generator)
        self.logits = torch.randn(self.tokens, experts, generator=generator) * 2
        self.plain: list[ExpertParts] = []
        self.packed: list[ExpertParts] = []
        for _ in range(experts):
            shapes = (2 * inner, size), (size, inner)
            weights = [torch.randn(shape, generator=generator) / shape[1] ** 0.5 for shape in shapes]
            biases = [torch.randn(len(each), generator=generator) if biased else None for each in weights]
            both = list(zip(weights, biases, strict=True))
            self.plain.append(ExpertParts(*(plain_linear.pack_linear(stored(w, format), b) for w, b in both)))
            self.packed.append(ExpertParts(*(pack(w, b) for w, b in both)))

    def expected(self, gate: Gate, chosen: Tensor, weights: Tensor) -> Tensor:
        return run(reference.pack_experts(self.plain, gate), self.x, chosen, weights)


def run(experts: FusedExperts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out = torch.ones_like(x)
    experts.add_to(out, x, chosen, weights)
    return out


@needs_native
@pytest.mark.parametrize("gate", [SILU, CLAMPED, Gate("gelu_tanh")])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_experts_equal_the_reference(shape: tuple[int, int, int, int, int], format: str, gate: Gate) -> None:
    case = Case(shape, format, packers(native_linear, format), biased=gate == CLAMPED)
    chosen, weights = reference.route(case.logits, case.top_k, gate == SILU)
    found = run(native.pack_experts(case.packed, gate), case.x, chosen, weights)
    torch.testing.assert_close(found, case.expected(gate, chosen, weights), atol=2e-4, rtol=1e-3)


@pytest.mark.sample("shape1-*", "shape2-int4-*")
@pytest.mark.parametrize("gate", [SILU, CLAMPED])
@pytest.mark.parametrize("format", ["float32", "int8", "int4"])
@pytest.mark.parametrize("shape", [(1, 32, 32, 1, 1), (5, 64, 96, 7, 2), (70, 32, 64, 3, 3)])
def test_triton_experts_equal_the_reference(shape: tuple[int, int, int, int, int], format: str, gate: Gate) -> None:
    case = Case(shape, format, packers(triton_linear, format), biased=gate == CLAMPED)
    chosen, weights = reference.route(case.logits, case.top_k, gate == SILU)
    expected = case.expected(gate, chosen, weights)
    experts = triton_launch.pack_experts(case.packed, gate)
    found = run(experts, case.x.to(DEVICE), chosen.to(DEVICE), weights.to(DEVICE))
    torch.testing.assert_close(found.cpu(), expected, atol=2e-4, rtol=1e-3)
    num_bytes = sum(each.up.num_bytes + each.down.num_bytes for each in case.packed)
    assert experts.num_bytes == num_bytes


@needs_native
def test_experts_without_rows_are_skipped_and_one_may_get_all_rows() -> None:
    case = Case((50, 32, 32, 6, 2), "float32", packers(native_linear, "float32"), biased=True)
    chosen = torch.tensor([[4, 1]]).repeat(50, 1)
    weights = torch.rand(50, 2)
    expected = case.expected(SILU, chosen, weights)
    for experts, device in ((native.pack_experts(case.packed, SILU), "cpu"), (triton_experts(case), DEVICE)):
        found = run(experts, case.x.to(device), chosen.to(device), weights.to(device))
        torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


def triton_experts(case: Case) -> FusedExperts:
    pack = packers(triton_linear, "float32")
    parts = [ExpertParts(*(pack(each._weight, each._bias) for each in pair)) for pair in case.plain]
    return triton_launch.pack_experts(parts, SILU)


@needs_native
@pytest.mark.parametrize("format", FORMATS)
def test_a_tokens_result_has_the_same_bits_in_every_batch(format: str) -> None:
    case = Case((300, 64, 96, 5, 2), format, packers(native_linear, format), biased=True)
    experts = native.pack_experts(case.packed, SILU)
    chosen, weights = reference.route(case.logits, 2, True)
    together = run(experts, case.x, chosen, weights)
    for rows in (slice(0, 1), slice(7, 12), slice(100, 300)):
        alone, own = reference.route(case.logits[rows], 2, True)
        assert torch.equal(alone, chosen[rows])
        assert torch.equal(run(experts, case.x[rows], alone, own), together[rows])


@needs_native
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 64, 96, 7, 2), (5, 64, 96, 7, 2), (70, 32, 160, 3, 3)])
def test_quantized_weights_with_rounded_activations_stay_close(
    shape: tuple[int, int, int, int, int], bits: int
) -> None:
    """Matmuls use integers for few rows of an expert and bfloat16 for many."""

    def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return native_linear.pack_codes_for_bfloat16(quantize(weight.cpu().numpy(), bits), bias)  # type: ignore[arg-type]

    case = Case(shape, f"int{bits}", pack, biased=True)
    chosen, weights = reference.route(case.logits, case.top_k, True)
    found = run(native.pack_experts(case.packed, SILU), case.x, chosen, weights)
    torch.testing.assert_close(found, case.expected(SILU, chosen, weights), atol=0.04, rtol=0.02)


@needs_native
def test_the_number_of_threads_changes_no_bit() -> None:
    case = Case((300, 256, 512, 4, 2), "bfloat16", packers(native_linear, "bfloat16"), biased=True)
    experts = native.pack_experts(case.packed, CLAMPED)
    chosen, weights = reference.route(case.logits, 2, True)
    expected = run(experts, case.x, chosen, weights)
    set_num_threads(2)
    try:
        assert torch.equal(run(experts, case.x, chosen, weights), expected)
    finally:
        set_num_threads(1)


def test_weights_are_normalized_over_all_or_over_the_chosen_experts() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    shares = logits.softmax(-1)[0]
    chosen, weights = reference.route(logits, 2, False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], shares[[1, 2]])
    _, weights = reference.route(logits, 2, True)
    torch.testing.assert_close(weights[0], shares[[1, 2]] / shares[[1, 2]].sum())


@pytest.mark.parametrize("best_of_group", [1, 2])
@pytest.mark.parametrize("top_groups", [1, 2, 4])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_only_experts_of_the_best_groups_are_chosen(scores: str, top_groups: int, best_of_group: int) -> None:
    """The reference is the formula, for one token after another."""
    generator = torch.Generator().manual_seed(top_groups)
    logits, bias = torch.randn(9, 12, generator=generator), torch.randn(12, generator=generator)
    gating = Gating(scores, 4, top_groups, best_of_group, 2.5)
    chosen, weights = reference.route_by_groups(logits, 3, True, gating, bias)
    for token, row in enumerate(logits):
        values = row.softmax(0) if scores == "softmax" else 1 / (1 + torch.exp(-row))
        wanted = (values + bias).tolist()
        groups = [list(range(3 * group, 3 * group + 3)) for group in range(4)]
        groups.sort(key=lambda group: -sum(sorted((wanted[each] for each in group), reverse=True)[:best_of_group]))
        allowed = sorted((each for group in groups[:top_groups] for each in group), key=lambda each: -wanted[each])
        assert chosen[token].tolist() == allowed[:3]
        shares = values[allowed[:3]] / values[allowed[:3]].sum()
        torch.testing.assert_close(weights[token], 2.5 * shares)


@pytest.mark.parametrize("num_experts", [3, 8, 60, 200])
def test_ties_are_broken_equally_in_every_batch_and_no_expert_is_chosen_twice(num_experts: int) -> None:
    logits = torch.zeros(40, num_experts)
    chosen, weights = reference.route(logits, 3, True)
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    torch.testing.assert_close(weights, torch.full((40, 3), 1 / 3))
    for row in (0, 13, 39):
        assert torch.equal(reference.route(logits[row : row + 1], 3, True)[0][0], chosen[row])


@needs_native
def test_rows_of_another_width_are_refused() -> None:
    case = Case((2, 32, 32, 2, 1), "float32", packers(native_linear, "float32"), biased=False)
    experts = native.pack_experts(case.packed, SILU)
    with pytest.raises(ValueError, match=r"float32 \[tokens, 32\] is needed"):
        experts.add_to(torch.zeros(2, 32), torch.zeros(2, 33), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))


def test_weights_of_different_kinds_cannot_be_combined() -> None:
    floats = triton_linear.pack_linear(torch.zeros(64, 32), None)
    codes = triton_linear.pack_codes(quantize(np.zeros((64, 32), dtype=np.float32), 8), None)
    down = triton_linear.pack_linear(torch.zeros(32, 32), None)
    with pytest.raises(TypeError, match="CodesLinear, FloatLinear are not multiplied together"):
        triton_launch.pack_experts([ExpertParts(floats, down), ExpertParts(codes, down)], SILU)


@pytest.mark.skipif(HAS_GPU, reason="kernels of the interpreter are watched")
@pytest.mark.parametrize("tokens", [1, 200])
def test_launches_depend_only_on_shapes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors have no values and raise when they are read, so a step neither waits nor depends on values."""
    meta, launched = torch.device("meta"), []
    monkeypatch.setattr(launch, "device", lambda: meta)
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda kernel, *args, grid, warmup, **named: launched.append(kernel.fn.__name__)
    )
    up, down = (triton_linear.pack_linear(torch.empty(shape, device=meta), None) for shape in ((64, 32), (32, 32)))
    experts = triton_launch.pack_experts([ExpertParts(up, down)] * 5, SILU)
    x = torch.empty(tokens, 32, device=meta)
    chosen, weights = reference.route(torch.empty(tokens, 5, device=meta), 2, True)
    experts.add_to(torch.empty_like(x), x, chosen, weights)
    assert launched == ["multiply_experts", "gate_and_mul", "multiply_experts", "add_weighted"]


@needs_native
@pytest.mark.parametrize("renormalized", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (5, 8, 2), (90, 64, 8), (3, 4, 4)])
def test_native_routing_equals_the_formula(tokens: int, experts: int, top_k: int, renormalized: bool) -> None:
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts)) * 3
    chosen, weights = native.route(logits, top_k, renormalized)
    expected_chosen, expected_weights = reference.route(logits, top_k, renormalized)
    assert torch.equal(chosen, expected_chosen)
    torch.testing.assert_close(weights, expected_weights)


@needs_native
@pytest.mark.parametrize(("experts", "top_k"), [(2, 1), (8, 2), (16, 4), (60, 4), (128, 2), (256, 8)])
def test_of_experts_with_equal_logits_torchs_choice_is_taken(experts: int, top_k: int) -> None:
    logits = torch.randint(0, 3, (50, experts), generator=torch.Generator().manual_seed(top_k)).float()
    logits[7, 1] = torch.nan
    chosen, weights = native.route(logits, top_k, True)
    expected, expected_weights = reference.route(logits, top_k, True)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, equal_nan=True)


@needs_native
@pytest.mark.parametrize("renormalized", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups", "best"),
    [(1, 1, 1, 1, 1), (6, 2, 1, 1, 1), (12, 3, 4, 2, 1), (64, 8, 8, 4, 2), (256, 8, 8, 4, 2), (160, 6, 8, 3, 1)],
)
def test_native_routing_by_groups_equals_the_formula(
    experts: int, top_k: int, groups: int, top_groups: int, best: int, scores: str, biased: bool, renormalized: bool
) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(40, experts, generator=generator) * 3
    bias = torch.randn(experts, generator=generator) if biased else None
    gating = Gating(scores, groups, top_groups, best, 1.7)
    chosen, weights = native.route_by_groups(logits, top_k, renormalized, gating, bias)
    expected, expected_weights = reference.route_by_groups(logits, top_k, renormalized, gating, bias)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)
    alone, own = native.route_by_groups(logits[3:4], top_k, renormalized, gating, bias)
    assert (alone.tolist(), own.tolist()) == (chosen[3:4].tolist(), weights[3:4].tolist()), "in any batch the same bits"


@needs_native
def test_of_groups_with_equal_scores_torchs_choice_is_taken() -> None:
    logits = torch.randint(0, 2, (60, 32), generator=torch.Generator().manual_seed(4)).float()
    gating = Gating("sigmoid", 8, 3, 2, 1.0)
    chosen, _ = native.route_by_groups(logits, 4, True, gating, None)
    assert torch.equal(chosen, reference.route_by_groups(logits, 4, True, gating, None)[0])


@needs_native
@pytest.mark.parametrize(("tokens", "size"), [(1, 8), (5, 33), (200, 256)])
def test_gated_outputs_are_added(tokens: int, size: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    out, x = (torch.randn(tokens, size, generator=generator) for _ in range(2))
    gates = torch.randn(tokens, 1, generator=generator) * 40
    expected = out.clone()
    reference.add_gated(expected, x, gates)
    native.add_gated(out, x, gates)
    torch.testing.assert_close(out, expected)
