"""Adapters' additions to products by the native kernels give those of the formulas, whatever rows they meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pagemill_kernels import arrays
from pagemill_kernels.adapters.native import NativeAdapters, PackedAdapter, PartOfB, pack
from pagemill_kernels.adapters.reference import AdapterMatrices, PlainAdapterRows
from pagemill_kernels.adapters.rows import ExpertRows
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.experts.native import NativeExperts
from pagemill_kernels.experts.parts import ExpertParts, Gate
from pagemill_kernels.experts.reference import PlainExperts
from pagemill_kernels.linear import native

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
Floats = NDArray[np.float32]


def draw(seed: int, *shape: int) -> Floats:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return arrays.widened(arrays.rounded(values))


def expected_of(slots: Any, loaded: dict[int, tuple[Floats, Floats]], x: Floats, out: Floats) -> Floats:
    """Return `out` with what the formulas add, in double."""
    wide = out.astype(np.float64)
    for slot, (a, b) in loaded.items():
        own = np.nonzero(slots == slot)[0]
        wide[own] += x[own].astype(np.float64) @ a.astype(np.float64).T @ b.astype(np.float64).T
    return wide.astype(np.float32)


@pytest.mark.parametrize("rank", [1, 8, 16, 33, 64])
@pytest.mark.parametrize(("ins", "outs"), [(32, 48), (1500, 130), (2048, 65)])
def test_rows_of_several_adapters_get_their_own_additions(rank: int, ins: int, outs: int) -> None:
    slots = np.array([2, -1, 0, 2, 1, -1, 0, 2, 2, 2, 5], dtype=np.int32)
    loaded = {slot: (draw(slot, rank + slot, ins), draw(slot + 9, outs, rank + slot)) for slot in (0, 1, 2)}
    x, out = draw(40, len(slots), ins), draw(41, len(slots), outs)
    expected = expected_of(slots, loaded, x, out)
    before = out.copy()
    packed: dict[int, dict[int, PackedAdapter]] = {slot: {1: pack(a, b)} for slot, (a, b) in loaded.items()} | {
        5: {0: pack(draw(3, 4, ins), draw(4, outs, 4))}
    }  # an adapter of another layer
    NativeAdapters(packed, 2).rows(slots).add_to(1, out, x)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())
    untouched = (slots == -1) | (slots == 5)
    assert np.array_equal(out[untouched], before[untouched])


def test_a_rows_bits_depend_on_no_other_row_and_no_number_of_threads() -> None:
    x, out = draw(1, 37, 2100), draw(2, 37, 192)
    adapters = NativeAdapters({0: {0: pack(draw(3, 24, 2100), draw(4, 192, 24))}}, 1)
    together, alone = out.copy(), out.copy()
    adapters.rows(np.zeros(37, dtype=np.int32)).add_to(0, together, x)
    for row in range(37):
        slots = np.full(37, -1, dtype=np.int32)
        slots[row] = 0
        adapters.rows(slots).add_to(0, alone, x)
    assert np.array_equal(together, alone)
    threads = launch.num_threads()
    try:
        launch.set_num_threads(1)
        single = out.copy()
        adapters.rows(np.zeros(37, dtype=np.int32)).add_to(0, single, x)
    finally:
        launch.set_num_threads(threads)
    assert np.array_equal(together, single)


def test_parts_of_a_stacked_product_have_their_own_sums() -> None:
    a = draw(1, 12, 96)
    b = [draw(2, 70, 8), draw(3, 33, 4)]
    x, out = draw(4, 5, 96), draw(5, 5, 200)
    expected = out.astype(np.float64)
    expected[:, 10:80] += x.astype(np.float64) @ a[:8].T @ b[0].T
    expected[:, 100:133] += x.astype(np.float64) @ a[8:].T @ b[1].T
    packed = PackedAdapter(a, [PartOfB(10, 0, b[0]), PartOfB(100, 8, b[1])])
    NativeAdapters({0: {0: packed}}, 1).rows(np.zeros(5, dtype=np.int32)).add_to(0, out, x)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)
    assert packed.num_bytes == 2 * (96 * 16 + 2 * 64 * 8 + 64 * 4)


def test_embeddings_get_columns_of_a() -> None:
    a, b = draw(1, 5, 50), draw(2, 40, 5)
    ids, slots = np.array([3, 7, -1, 49]), np.array([0, -1, 0, 0], dtype=np.int32)
    out = draw(3, 4, 40)
    expected = torch.from_numpy(out.copy())
    tensors = {0: {0: AdapterMatrices(torch.from_numpy(a), torch.from_numpy(b))}}
    PlainAdapterRows(torch.from_numpy(slots).long(), tensors).add_rows(0, expected, torch.from_numpy(ids))
    NativeAdapters({0: {0: pack(a, b)}}, 1).rows(slots).add_rows(0, out, ids)
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_experts_add_inside_each_expert() -> None:
    size, inner, num_experts, top_k, tokens = 64, 48, 5, 2, 23
    ups, downs = draw(1, num_experts, 2 * inner, size), draw(2, num_experts, size, inner)
    packed = [[native.pack_linear(each, None) for each in whole] for whole in (ups, downs)]
    experts = NativeExperts(packed[0], packed[1], Gate("silu"))
    rng = np.random.default_rng(3)
    chosen = np.stack([rng.choice(num_experts, top_k, replace=False) for _ in range(tokens)])
    weights, x = rng.random((tokens, top_k), dtype=np.float32), draw(4, tokens, size) * np.float32(0.1)
    slots = rng.integers(-1, 2, tokens).astype(np.int32)
    loaded = {
        slot: {
            1 + 2 * expert + down: (draw(slot + expert, 6, (size, inner)[down]) * np.float32(0.125),
                                    draw(slot + expert + 50, (2 * inner, size)[down], 6))
            for expert in (0, 2, 4)
            for down in (0, 1)
        }
        for slot in (0, 1)
    }  # fmt: skip
    adapters = NativeAdapters({s: {n: pack(*each) for n, each in one.items()} for s, one in loaded.items()}, 12)
    out = np.zeros((tokens, size), dtype=np.float32)
    experts.add_to(out, x, chosen, weights, adapters.rows(slots), first_linear=1)

    def plain(weight: Floats) -> Any:
        return lambda rows: rows @ torch.from_numpy(weight).T

    parts = [ExpertParts(plain(up), plain(down)) for up, down in zip(ups, downs, strict=True)]
    tensors = {
        slot: {number: AdapterMatrices(*map(torch.from_numpy, each)) for number, each in one.items()}
        for slot, one in loaded.items()
    }
    expected = torch.zeros(tokens, size)
    rows = ExpertRows(PlainAdapterRows(torch.from_numpy(slots).long(), tensors), 1)
    PlainExperts(parts, Gate("silu")).add_to(
        expected, torch.from_numpy(x), torch.from_numpy(chosen), torch.from_numpy(weights), rows
    )
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    alone = np.zeros_like(out)
    experts.add_to(alone, x, chosen, weights)
    assert np.array_equal(out[slots == -1], alone[slots == -1])
    assert not np.array_equal(out[slots >= 0], alone[slots >= 0])
