"""The delta rule and the short convolution: any division of tokens into steps gives the plain recurrence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_kernels.recurrent.plan import plan_states
from pagemill_kernels.recurrent.reference import DeltaInputs, causal_convolution, delta_rule

BLOCK = 16
KEYS, VALUES, KEY_DIM, VALUE_DIM, WIDTH = 2, 6, 8, 12, 3
CHANNELS = 5
ZERO_SLOT = 64


def tokens(count: int, seed: int) -> tuple[DeltaInputs, Tensor]:
    torch.manual_seed(seed)
    decay = -torch.rand(count, VALUES) * 0.2
    shapes = (KEYS, KEY_DIM), (KEYS, KEY_DIM), (VALUES, VALUE_DIM)
    query, key, value = (torch.randn(count, *shape) for shape in shapes)
    return DeltaInputs(query, key, value, decay, torch.rand(count, VALUES)), torch.randn(count, CHANNELS)


def plain(inputs: DeltaInputs, x: Tensor, weight: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the outputs, the states behind all tokens and the convolution, taken token by token in float64."""
    query, key, value, decay, rate = (each.double() for each in inputs)
    query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    query, key = (each.repeat_interleave(VALUES // KEYS, 1) for each in (query * KEY_DIM**-0.5, key))
    state, outputs, states = torch.zeros(VALUES, KEY_DIM, VALUE_DIM, dtype=torch.float64), [], []
    for at in range(len(x)):
        state = state * decay[at].exp()[:, None, None]
        error = value[at] - torch.einsum("hkv,hk->hv", state, key[at])
        state = state + torch.einsum("hk,hv->hkv", key[at], rate[at][:, None] * error)
        outputs.append(torch.einsum("hkv,hk->hv", state, query[at]))
        states.append(state)
    before = torch.cat([torch.zeros(WIDTH - 1, CHANNELS), x]).double()
    convolved = sum(before[offset : offset + len(x)] * weight[:, offset] for offset in range(WIDTH))
    return torch.stack(outputs), states, torch.nn.functional.silu(convolved)


class Rows:
    """Rows with logs and states, to which steps are given by hand."""

    def __init__(self, num_rows: int) -> None:
        nan = torch.nan  # nothing is read that was not written
        self.states = torch.full((ZERO_SLOT + 1, VALUES, KEY_DIM, VALUE_DIM), nan)
        self.windows = torch.full((ZERO_SLOT + 1, WIDTH - 1, CHANNELS), nan)
        self.states[ZERO_SLOT] = self.windows[ZERO_SLOT] = 0
        self.log = torch.full((num_rows, BLOCK, KEYS * KEY_DIM + VALUES * (VALUE_DIM + 1)), nan)
        self.inputs = torch.full((num_rows, WIDTH - 1, CHANNELS), nan)
        self.slots = [ZERO_SLOT] * num_rows
        self.computed = [0] * num_rows

    def step(self, pieces: dict[int, tuple[DeltaInputs, Tensor]], weight: Tensor, keep_all: bool) -> tuple[Any, ...]:
        rows, writes, counts = list(pieces), [], []
        sources = [self.slots[row] for row in rows]
        logged = [self.computed[row] % BLOCK for row in rows]
        kept = {}
        free = iter(sorted(set(range(ZERO_SLOT)) - set(self.slots)))
        for request, row in enumerate(rows):
            count = len(pieces[row][1])
            counts.append(count)
            first, last = self.computed[row] // BLOCK, (self.computed[row] + count) // BLOCK
            for boundary in range(first + 1, last + 1):
                if keep_all or boundary == last:
                    kept[row, boundary] = self.slots[row] = next(free)
                    writes.append((request, boundary - first, self.slots[row]))
            self.computed[row] += count
        loc = np.concatenate([[0], np.cumsum(counts)])
        batch = StateBatch(
            np.array(rows), loc, np.array(sources), np.array(logged), np.array(writes).reshape(-1, 3).astype(int), BLOCK
        )
        plan = plan_states(batch)
        inputs = DeltaInputs(*(torch.cat(each) for each in zip(*(piece for piece, _ in pieces.values()), strict=True)))
        x = torch.cat([each for _, each in pieces.values()])
        convolved = causal_convolution(x, weight, self.windows, self.inputs, plan)
        outputs = delta_rule(inputs, self.states, self.log, plan)
        return outputs.split(counts), convolved.split(counts), kept


def piece(inputs: DeltaInputs, x: Tensor, first: int, end: int) -> tuple[DeltaInputs, Tensor]:
    return DeltaInputs(*(each[first:end] for each in inputs)), x[first:end]


@pytest.mark.parametrize("most", [1, 5, 16, 40, 200])
@pytest.mark.parametrize("keep_all", [False, True])
def test_any_division_into_steps_gives_the_plain_recurrence(most: int, keep_all: bool) -> None:
    torch.manual_seed(most)
    weight = torch.randn(CHANNELS, WIDTH)
    lengths = (70, 33, 150)
    made = [tokens(length, seed) for seed, length in enumerate(lengths)]
    expected = [plain(*each, weight) for each in made]
    rows = Rows(len(lengths) + 1)
    while any(done < length for done, length in zip(rows.computed, lengths, strict=False)):
        pieces = {}
        for row, length in enumerate(lengths):
            first = rows.computed[row]
            count = min(length - first, int(torch.randint(1, most + 1, ())))
            if count and torch.rand(()) < 0.8:
                pieces[row] = piece(*made[row], first, first + count)
        if not pieces:
            continue
        before = list(rows.computed)
        outputs, convolved, kept = rows.step(pieces, weight, keep_all)
        for row, out, wide in zip(pieces, outputs, convolved, strict=True):
            own = slice(before[row], rows.computed[row])
            torch.testing.assert_close(out.double(), expected[row][0][own], atol=2e-5, rtol=0)
            torch.testing.assert_close(wide.double(), expected[row][2][own], atol=2e-5, rtol=0)
        for (row, boundary), slot in kept.items():
            state = expected[row][1][boundary * BLOCK - 1]
            torch.testing.assert_close(rows.states[slot].double(), state, atol=1e-5 * float(state.abs().max()), rtol=0)
            window = made[row][1][boundary * BLOCK - WIDTH + 1 : boundary * BLOCK]
            assert torch.equal(rows.windows[slot], window)


@pytest.mark.full
def test_states_after_4096_tokens_are_those_of_the_plain_recurrence() -> None:
    weight = torch.randn(CHANNELS, WIDTH)
    made = tokens(4096, 1)
    state = plain(*made, weight)[1][-1]
    for count in (1, 512, 4096):
        rows = Rows(1)
        for first in range(0, 4096, count):
            rows.step({0: piece(*made, first, first + count)}, weight, False)
        torch.testing.assert_close(
            rows.states[rows.slots[0]].double(), state, atol=1e-5 * float(state.abs().max()), rtol=0
        )
