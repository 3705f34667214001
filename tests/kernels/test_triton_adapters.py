"""Triton's additions of adapters equal the formulas, for products, experts and embeddings."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, close, random

from pagemill_kernels.adapters.reference import AdapterMatrices, PlainAdapterRows
from pagemill_kernels.adapters.triton_launch import TritonAdapterRows, stacked

SLOTS = torch.tensor([1, -1, 0, 3, 1, 0, -1], device=DEVICE)
RANKS = {0: 4, 1: 16, 3: 20}


def matrices(slot: int, ins: int, outs: int, dtype: torch.dtype, seed: int = 0) -> AdapterMatrices:
    rank = RANKS[slot]
    return AdapterMatrices(
        random(rank, ins, dtype=dtype, seed=seed + slot) * 0.1, random(outs, rank, dtype=dtype, seed=seed + slot + 9)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("ins", "outs"), [(64, 48), (200, 130)])
def test_rows_get_the_additions_of_their_adapters(ins: int, outs: int, dtype: torch.dtype) -> None:
    loaded = {slot: {5: matrices(slot, ins, outs, dtype)} for slot in RANKS}
    stacks = {5: stacked([loaded.get(slot, {}).get(5) for slot in range(4)])}
    x, out = random(len(SLOTS), ins, dtype=dtype), random(len(SLOTS), outs, dtype=dtype, seed=3)
    expected, base = out.clone(), out.clone()
    PlainAdapterRows(SLOTS, loaded).add_to(5, expected, x)
    rows = TritonAdapterRows(SLOTS, stacks)
    rows.add_to(5, out, x)
    rows.add_to(6, out, x)  # no adapter has matrices for it
    close(out, expected)
    assert torch.equal(out[SLOTS < 0], base[SLOTS < 0])
    assert not torch.equal(out[SLOTS >= 0], base[SLOTS >= 0])


def test_experts_get_those_of_their_own_matrices() -> None:
    ins, outs, num_experts, first = 64, 96, 3, 7
    loaded = {
        slot: {
            first + 2 * expert: matrices(slot, ins, outs, torch.float32, seed=50 * expert)
            for expert in range(num_experts)
        }
        for slot in RANKS
    }
    stacks = {
        first: stacked(
            [loaded.get(slot, {}).get(first + 2 * expert) for slot in range(4) for expert in range(num_experts)],
            num_experts,
        )
    }
    experts = torch.tensor([0, 2, 1, 1, 0, 2, 0, 1, 2], device=DEVICE)
    rows = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5, 6], device=DEVICE)
    x, out = random(len(rows), ins), random(len(rows), outs, seed=3)
    expected = out.clone()
    PlainAdapterRows(SLOTS, loaded).add_to_many(first, experts, expected, x, rows)
    TritonAdapterRows(SLOTS, stacks).add_to_many(first, experts, out, x, rows)
    close(out, expected)


def test_embeddings_get_columns_of_a() -> None:
    loaded = {slot: {0: matrices(slot, 50, 40, torch.float32)} for slot in RANKS}
    stacks = {0: stacked([loaded.get(slot, {}).get(0) for slot in range(4)])}
    ids = torch.tensor([3, 4, -1, 49, 0, 7, 8], device=DEVICE)
    out = random(len(ids), 40)
    expected = out.clone()
    PlainAdapterRows(SLOTS, loaded).add_rows(0, expected, ids)
    TritonAdapterRows(SLOTS, stacks).add_rows(0, out, ids)
    close(out, expected)


def test_matrices_are_those_of_the_rows() -> None:
    loaded = {slot: {0: matrices(slot, 50, 40, torch.float32)} for slot in RANKS}
    made = TritonAdapterRows(SLOTS, {0: stacked([loaded.get(slot, {}).get(0) for slot in range(4)])})
    found = {int(SLOTS[rows[0]]): (rows, each) for rows, each in made.matrices(0)}
    assert found.keys() == RANKS.keys()
    for slot, (rows, each) in found.items():
        assert rows.tolist() == torch.nonzero(slot == SLOTS)[:, 0].tolist()
        close(each.b @ each.a, loaded[slot][0].b @ loaded[slot][0].a)
