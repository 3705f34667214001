"""The delta rule with decays by channel: any division of tokens into steps gives the plain recurrence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pagemill_kernels.cpu import library
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_kernels.recurrent.reference import DeltaHeads
from pagemill_kernels.registry import Backend, resolve

BLOCK = 16
HEADS, KEY_DIM, VALUE_DIM = 3, 10, 12
LENGTH = 100
WEIGHTS = DeltaHeads(
    -torch.linspace(0.001, 0.3, HEADS),
    torch.linspace(-1, 1, HEADS * KEY_DIM),
    torch.linspace(1, -1, VALUE_DIM),
    1e-3,
    1.5,
)


class Inputs(NamedTuple):
    x: Tensor
    """Queries, keys and values, as a convolution gives them."""
    rates: Tensor
    steps: Tensor
    gates: Tensor

    def cut(self, first: int, end: int) -> Inputs:
        return Inputs(*(each[first:end] for each in self))


@pytest.fixture(params=["reference", "cpu_native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu_native" and library.load() is None:
        pytest.skip(f"no native kernels: {library.unavailable_reason()}")
    return str(request.param)


def tokens(count: int, seed: int) -> Inputs:
    torch.manual_seed(seed)
    sizes = HEADS * (2 * KEY_DIM + VALUE_DIM), HEADS, HEADS * KEY_DIM, HEADS * VALUE_DIM
    return Inputs(*(torch.randn(count, size) for size in sizes))


def plain(inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs and the states behind all tokens, taken token by token in float64."""
    x, rates, steps, gates = (each.double() for each in inputs)
    query, key, value = x.split([HEADS * KEY_DIM, HEADS * KEY_DIM, HEADS * VALUE_DIM], -1)
    query, key, value = (each.view(len(x), HEADS, -1) for each in (query, key, value))
    query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    step = torch.nn.functional.softplus(steps + WEIGHTS.biases).view(key.shape)
    decay, rate = WEIGHTS.decays[:, None] * step, WEIGHTS.rate_scale * rates.sigmoid()
    state, outputs, states = torch.zeros(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64), [], []
    for at in range(len(x)):
        state = state * decay[at].exp()[..., None]
        error = value[at] - torch.einsum("hkv,hk->hv", state, key[at])
        state = state + torch.einsum("hk,hv->hkv", key[at], rate[at][:, None] * error)
        outputs.append(torch.einsum("hkv,hk->hv", state, query[at] * KEY_DIM**-0.5))
        states.append(state)
    out = torch.stack(outputs)
    out = out * (out.square().mean(-1, keepdim=True) + WEIGHTS.eps).rsqrt() * WEIGHTS.norm
    return out * gates.sigmoid().view(out.shape), states


class ChannelRow:
    """One row, to which steps are given by hand; every state is kept."""

    def __init__(self, backend: Backend, length: int) -> None:
        self.plan, self.rule = resolve("plan_states", backend), resolve("channel_delta_rule", backend)
        self.zero = length // BLOCK
        nan = torch.nan  # nothing is read that was not written
        self.states = torch.full((self.zero + 1, HEADS, KEY_DIM, VALUE_DIM), nan)
        self.states[self.zero] = 0
        self.log = torch.full((1, BLOCK, HEADS * (2 * KEY_DIM + VALUE_DIM)), nan)
        self.computed = 0

    def step(self, inputs: Inputs) -> Tensor:
        first, last = self.computed // BLOCK, (self.computed + len(inputs.x)) // BLOCK
        writes = [(0, boundary - first, boundary - 1) for boundary in range(first + 1, last + 1)]
        batch = StateBatch(
            np.array([0]),
            np.array([0, len(inputs.x)]),
            np.array([first - 1 if first else self.zero]),
            np.array([self.computed % BLOCK]),
            np.array(writes, dtype=int).reshape(-1, 3),
            BLOCK,
        )
        self.computed += len(inputs.x)
        out: Tensor = self.rule(*inputs, WEIGHTS, self.states, self.log, self.plan(batch))
        return out


def check(backend: Backend, most: int) -> None:
    made = tokens(LENGTH, most)
    expected, states = plain(made)
    rows, outputs = ChannelRow(backend, LENGTH), []
    while rows.computed < LENGTH:
        outputs.append(rows.step(made.cut(rows.computed, rows.computed + int(torch.randint(1, most + 1, ())))))
    torch.testing.assert_close(torch.cat(outputs).double(), expected, atol=3e-5, rtol=0)
    for boundary in range(LENGTH // BLOCK):
        state = states[(boundary + 1) * BLOCK - 1]
        torch.testing.assert_close(rows.states[boundary].double(), state, atol=1e-5 * float(state.abs().max()), rtol=0)


@pytest.mark.parametrize("most", [1, 5, 40, LENGTH])
def test_any_division_into_steps_gives_the_plain_recurrence(most: int, backend: Backend) -> None:
    check(backend, most)


@pytest.mark.full
def test_states_after_4096_tokens_are_those_of_the_plain_recurrence(backend: Backend) -> None:
    made = tokens(4096, 1)
    state = plain(made)[1][-1]
    for count in (1, 512, 4096):
        rows = ChannelRow(backend, 4096)
        for first in range(0, 4096, count):
            rows.step(made.cut(first, first + count))
        found = rows.states[4096 // BLOCK - 1].double()
        torch.testing.assert_close(found, state, atol=1e-5 * float(state.abs().max()), rtol=0)


@pytest.mark.parametrize("fault", ["a decay is logged for another channel", "a state is lost", "silu of the gates"])
def test_planted_faults_are_detected(fault: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    step = ChannelRow.step

    def faulty(rows: ChannelRow, inputs: Inputs) -> Tensor:
        out = step(rows, inputs)
        if fault == "a decay is logged for another channel":
            decays = rows.log[..., -HEADS * KEY_DIM :]
            decays[...] = decays.roll(1, -1)
        elif fault == "a state is lost" and rows.computed >= BLOCK:
            rows.states[rows.computed // BLOCK - 1] = 0
        elif fault == "silu of the gates":
            out = out * inputs.gates.view(out.shape)
        return out

    monkeypatch.setattr(ChannelRow, "step", faulty)
    with pytest.raises(AssertionError):
        check(backend, 5)
