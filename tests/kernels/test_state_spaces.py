"""Mamba 2's state space: any division of tokens into steps gives the plain recurrence, with each form of its gates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pagemill_kernels.cpu import library
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_kernels.recurrent.state_space import StateSpaceHeads
from pagemill_kernels.registry import Backend, resolve

BLOCK = 16
GROUPS, HEADS, STATE, HEAD_DIM = 2, 6, 10, 12
INNER = HEADS * HEAD_DIM
LENGTH = 100
WEIGHTS = torch.linspace(0.25, 1.25, INNER)
GATES: dict[str, tuple[Tensor | None, int, bool]] = {
    "norms by group behind the gates": (WEIGHTS, INNER // GROUPS, True),
    "one norm before the gates": (WEIGHTS, INNER, False),
    "no norm": (None, HEAD_DIM, True),
}


class Inputs(NamedTuple):
    x: Tensor
    """Values, then B and C, as a convolution gives them."""
    steps: Tensor
    gates: Tensor

    def cut(self, first: int, end: int) -> Inputs:
        return Inputs(*(each[first:end] for each in self))


@pytest.fixture(params=["reference", "cpu_native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu_native" and library.load() is None:
        pytest.skip(f"no native kernels: {library.unavailable_reason()}")
    return str(request.param)


def heads_of(gates: str) -> StateSpaceHeads:
    decays, biases, skips = (
        -torch.linspace(0.001, 0.2, HEADS),
        torch.linspace(-1, 1, HEADS),
        torch.linspace(1, -1, HEADS),
    )
    norm, size, first = GATES[gates]
    return StateSpaceHeads(decays, biases, skips, norm, size, 1e-3, first, (0.2, 1.5))


def tokens(count: int, seed: int) -> Inputs:
    torch.manual_seed(seed)
    return Inputs(*(torch.randn(count, size) for size in (INNER + 2 * GROUPS * STATE, HEADS, INNER)))


def plain(inputs: Inputs, heads: StateSpaceHeads) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs and the states behind all tokens, taken token by token in float64."""
    x, steps, gates = (each.double() for each in inputs)
    values, read, written = x.split([INNER, GROUPS * STATE, GROUPS * STATE], -1)
    values = values.view(-1, HEADS, HEAD_DIM)
    read, written = (each.view(-1, GROUPS, STATE).repeat_interleave(HEADS // GROUPS, 1) for each in (read, written))
    steps = torch.nn.functional.softplus(steps + heads.biases).clamp(*heads.step_limits)
    state, outputs, states = torch.zeros(HEADS, STATE, HEAD_DIM, dtype=torch.float64), [], []
    for at in range(len(x)):
        state = state * (heads.decays * steps[at]).exp()[:, None, None]
        state = state + torch.einsum("hk,hv->hkv", read[at], steps[at][:, None] * values[at])
        outputs.append(torch.einsum("hkv,hk->hv", state, written[at]) + heads.skips[:, None] * values[at])
        states.append(state)
    out, gate = torch.stack(outputs).flatten(1), torch.nn.functional.silu(gates)
    if heads.norm is None:
        return (out * gate).view(values.shape), states
    parts = (out * gate if heads.gates_first else out).view(len(x), -1, heads.norm_size)
    parts = parts * (parts.square().mean(-1, keepdim=True) + heads.eps).rsqrt()
    out = parts.flatten(1) * heads.norm
    return (out if heads.gates_first else out * gate).view(values.shape), states


class Row:
    """One row, to which steps are given by hand; every state is kept."""

    def __init__(self, backend: Backend, heads: StateSpaceHeads, length: int) -> None:
        self.plan, self.space = resolve("plan_states", backend), resolve("state_space", backend)
        self.zero = length // BLOCK
        nan = torch.nan  # nothing is read that was not written
        self.states = torch.full((self.zero + 1, HEADS, STATE, HEAD_DIM), nan)
        self.states[self.zero] = 0
        self.log = torch.full((1, BLOCK, GROUPS * STATE + HEADS * (HEAD_DIM + 1)), nan)
        self.heads, self.computed = heads, 0

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
        out: Tensor = self.space(*inputs, self.heads, self.states, self.log, self.plan(batch))
        return out


def check(backend: Backend, heads: StateSpaceHeads, most: int) -> None:
    made = tokens(LENGTH, most)
    expected, states = plain(made, heads)
    row, outputs = Row(backend, heads, LENGTH), []
    while row.computed < LENGTH:
        outputs.append(row.step(made.cut(row.computed, row.computed + int(torch.randint(1, most + 1, ())))))
    torch.testing.assert_close(torch.cat(outputs).double(), expected, atol=3e-5, rtol=0)
    for boundary in range(LENGTH // BLOCK):
        state = states[(boundary + 1) * BLOCK - 1]
        torch.testing.assert_close(row.states[boundary].double(), state, atol=1e-5 * float(state.abs().max()), rtol=0)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("most", [1, 5, 40, LENGTH])
def test_any_division_into_steps_gives_the_plain_recurrence(most: int, gates: str, backend: Backend) -> None:
    check(backend, heads_of(gates), most)


@pytest.mark.full
def test_states_after_4096_tokens_are_those_of_the_plain_recurrence(backend: Backend) -> None:
    made, heads = tokens(4096, 1), heads_of("no norm")
    state = plain(made, heads)[1][-1]
    for count in (1, 512, 4096):
        row = Row(backend, heads, 4096)
        for first in range(0, 4096, count):
            row.step(made.cut(first, first + count))
        found = row.states[4096 // BLOCK - 1].double()
        torch.testing.assert_close(found, state, atol=1e-5 * float(state.abs().max()), rtol=0)


@pytest.mark.parametrize("fault", ["an input is logged twice", "a state is lost", "gates behind the norm"])
def test_planted_faults_are_detected(fault: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Row.step

    def faulty(row: Row, inputs: Inputs) -> Tensor:
        if fault == "an input is logged twice" and row.computed % BLOCK > 1:
            row.log[0, 1] = row.log[0, 0]
        elif fault == "a state is lost" and row.computed >= BLOCK:
            row.states[row.computed // BLOCK - 1] = 0
        elif fault == "gates behind the norm":
            row.heads = row.heads._replace(gates_first=False)
        return step(row, inputs)

    monkeypatch.setattr(Row, "step", faulty)
    with pytest.raises(AssertionError):
        check(backend, heads_of("norms by group behind the gates"), 5)
