"""The delta rule and the short convolution: any division of tokens into steps gives the plain recurrence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pagemill_kernels.cpu import library
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_kernels.recurrent.reference import Convolution, DeltaHeads
from pagemill_kernels.registry import Backend, resolve

BLOCK = 16
KEYS, VALUES, KEY_DIM, VALUE_DIM, WIDTH = 2, 6, 8, 12, 3
CHANNELS = 5
ZERO_SLOT = 64
HEADS = DeltaHeads(
    -torch.linspace(0.001, 0.2, VALUES), torch.linspace(-1, 1, VALUES), torch.linspace(1, -1, VALUE_DIM), 1e-3
)


class DeltaInputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    rates: Tensor
    gates: Tensor

    @property
    def x(self) -> Tensor:
        return torch.cat([each.flatten(1) for each in self[:3]], 1)


@pytest.fixture(params=["reference", "cpu_native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu_native" and library.load() is None:
        pytest.skip(f"no native kernels: {library.unavailable_reason()}")
    return str(request.param)


def tokens(count: int, seed: int) -> tuple[DeltaInputs, Tensor]:
    torch.manual_seed(seed)
    shapes = (KEYS, KEY_DIM), (KEYS, KEY_DIM), (VALUES, VALUE_DIM)
    query, key, value = (torch.randn(count, *shape) for shape in shapes)
    rates, gates = torch.randn(count, 2 * VALUES), torch.randn(count, VALUES * VALUE_DIM)
    return DeltaInputs(query, key, value, rates, gates), torch.randn(count, CHANNELS)


def plain(inputs: DeltaInputs, x: Tensor, taps: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the outputs, the states behind all tokens and the convolution, taken token by token in float64."""
    query, key, value, rates, gates = (each.double() for each in inputs)
    decay = HEADS.decays * torch.nn.functional.softplus(rates[:, VALUES:] + HEADS.biases)
    rate = rates[:, :VALUES].sigmoid()
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
    convolved = sum(before[offset : offset + len(x)] * taps[offset] for offset in range(WIDTH))
    out = torch.stack(outputs)
    out = out * (out.square().mean(-1, keepdim=True) + HEADS.eps).rsqrt() * HEADS.norm
    out = out * torch.nn.functional.silu(gates).view(out.shape)
    return out, states, torch.nn.functional.silu(convolved)


class Rows:
    """Rows with logs and states, to which steps are given by hand."""

    def __init__(self, backend: Backend, num_rows: int) -> None:
        names = ("plan_states", "causal_convolution", "delta_rule")
        self.plan, self.convolve, self.delta_rule = (resolve(name, backend) for name in names)
        nan = torch.nan  # nothing is read that was not written
        self.states = torch.full((ZERO_SLOT + 1, VALUES, KEY_DIM, VALUE_DIM), nan)
        self.windows = torch.full((ZERO_SLOT + 1, WIDTH - 1, CHANNELS), nan)
        self.states[ZERO_SLOT] = self.windows[ZERO_SLOT] = 0
        self.log = torch.full((num_rows, BLOCK, KEYS * KEY_DIM + VALUES * (VALUE_DIM + 1)), nan)
        self.inputs = torch.full((num_rows, WIDTH - 1, CHANNELS), nan)
        self.slots = [ZERO_SLOT] * num_rows
        self.computed = [0] * num_rows

    def step(self, pieces: dict[int, tuple[DeltaInputs, Tensor]], taps: Tensor, keep_all: bool) -> tuple[Any, ...]:
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
        plan = self.plan(batch)
        inputs = DeltaInputs(*(torch.cat(each) for each in zip(*(piece for piece, _ in pieces.values()), strict=True)))
        x = torch.cat([each for _, each in pieces.values()])
        convolved = self.convolve(x, Convolution(taps), self.windows, self.inputs, plan)
        outputs = self.delta_rule(inputs.x, inputs.rates, inputs.gates, HEADS, self.states, self.log, plan)
        return outputs.split(counts), convolved.split(counts), kept


def piece(inputs: DeltaInputs, x: Tensor, first: int, end: int) -> tuple[DeltaInputs, Tensor]:
    return DeltaInputs(*(each[first:end] for each in inputs)), x[first:end]


@pytest.mark.parametrize("most", [1, 5, 16, 40, 200])
@pytest.mark.parametrize("keep_all", [False, True])
def test_any_division_into_steps_gives_the_plain_recurrence(most: int, keep_all: bool, backend: Backend) -> None:
    torch.manual_seed(most)
    taps = torch.randn(WIDTH, CHANNELS)
    lengths = (70, 33, 150)
    made = [tokens(length, seed) for seed, length in enumerate(lengths)]
    expected = [plain(*each, taps) for each in made]
    rows = Rows(backend, len(lengths) + 1)
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
        outputs, convolved, kept = rows.step(pieces, taps, keep_all)
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
def test_states_after_4096_tokens_are_those_of_the_plain_recurrence(backend: Backend) -> None:
    taps = torch.randn(WIDTH, CHANNELS)
    made = tokens(4096, 1)
    state = plain(*made, taps)[1][-1]
    for count in (1, 512, 4096):
        rows = Rows(backend, 1)
        for first in range(0, 4096, count):
            rows.step({0: piece(*made, first, first + count)}, taps, False)
        torch.testing.assert_close(
            rows.states[rows.slots[0]].double(), state, atol=1e-5 * float(state.abs().max()), rtol=0
        )
