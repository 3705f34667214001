"""Proposed tokens in recurrent layers: outputs and states are those of the tokens that were kept, whatever was computed
behind them and taken back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pagemill_kernels.cpu import library
from pagemill_kernels.recurrent import reference
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_kernels.recurrent.reference import Convolution, DeltaHeads
from pagemill_kernels.recurrent.state_space import StateSpaceHeads
from pagemill_kernels.registry import Backend, resolve

BLOCK, MOST, LENGTH = 16, 16, 150
KEYS, VALUES, KEY_DIM, VALUE_DIM = 2, 6, 8, 12
CHANNELS, WIDTH = 7, 4
ZERO_SLOT = 2 * (LENGTH // BLOCK)
Steps = list[tuple[int, int, int]]
"""Of each step: its own tokens, proposed ones, and of these the accepted ones."""


class Rule(NamedTuple):
    op: str
    sizes: tuple[int, ...]
    """Values of a token in each input."""
    weights: Any
    state: tuple[int, ...]
    log_size: int
    """0: a convolution, whose last inputs take the place of a log."""


def weights(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, int(np.prod(shape))).view(shape)


OF_VALUES = VALUES * VALUE_DIM
RULES = {
    "delta rule": Rule(
        "delta_rule",
        (2 * KEYS * KEY_DIM + OF_VALUES, 2 * VALUES, OF_VALUES),
        DeltaHeads(-torch.linspace(0.001, 0.2, VALUES), weights(VALUES), weights(VALUE_DIM), 1e-3),
        (VALUES, KEY_DIM, VALUE_DIM),
        KEYS * KEY_DIM + VALUES * (VALUE_DIM + 1),
    ),
    "delta rule with decays by channel": Rule(
        "channel_delta_rule",
        (VALUES * (2 * KEY_DIM + VALUE_DIM), VALUES, VALUES * KEY_DIM, OF_VALUES),
        DeltaHeads(-torch.linspace(0.001, 0.2, VALUES), weights(VALUES * KEY_DIM), weights(VALUE_DIM), 1e-3),
        (VALUES, KEY_DIM, VALUE_DIM),
        VALUES * (2 * KEY_DIM + VALUE_DIM),
    ),
    "state space": Rule(
        "state_space",
        (OF_VALUES + 2 * KEYS * KEY_DIM, VALUES, OF_VALUES),
        StateSpaceHeads(
            -torch.linspace(0.01, 0.4, VALUES), weights(VALUES), weights(VALUES), weights(OF_VALUES), VALUE_DIM, 1e-3,
            True, (0.0, float("inf")),
        ),
        (VALUES, KEY_DIM, VALUE_DIM),
        KEYS * KEY_DIM + VALUES * (VALUE_DIM + 1),
    ),
    "convolution": Rule(
        "causal_convolution",
        (CHANNELS,),
        Convolution(weights(WIDTH, CHANNELS), weights(CHANNELS)),
        (WIDTH - 1, CHANNELS),
        0,
    ),
}  # fmt: skip


class Rows:
    """Two rows, to which steps are given by hand."""

    def __init__(self, rule: Rule, backend: Backend) -> None:
        self.rule, self.backend = rule, backend
        self.plan_states, self.op = resolve("plan_states", backend), resolve(rule.op, backend)
        nan = torch.nan  # nothing is read that was not written
        self.states = torch.full((ZERO_SLOT + 1, *rule.state), nan)
        self.states[ZERO_SLOT] = 0
        log = (BLOCK + MOST, rule.log_size) if rule.log_size else (WIDTH - 1 + MOST, CHANNELS)
        self.log = torch.full((2, *log), nan)
        self.computed, self.boundaries, self.known = [0, 0], [0, 0], [0, 0]

    def slot(self, row: int, boundary: int) -> int:
        return 2 * (boundary - 1) + row if boundary else ZERO_SLOT

    def step(self, inputs: list[Tensor], counts: list[int], proposed: list[int]) -> list[Tensor]:
        """Compute `counts` tokens of each row, the last `proposed` of which may be taken back."""
        writes = []
        logged = [done - BLOCK * before for done, before in zip(self.computed, self.boundaries, strict=True)]
        sources = [self.slot(row, boundary) for row, boundary in enumerate(self.boundaries)]
        accepted = [done - known for done, known in zip(self.computed, self.known, strict=True)]
        for row in range(2):
            first = self.boundaries[row]
            self.known[row] = self.computed[row] + counts[row] - proposed[row]
            self.boundaries[row] = self.known[row] // BLOCK
            writes += [(row, end - first, self.slot(row, end)) for end in range(first + 1, self.boundaries[row] + 1)]
            self.computed[row] += counts[row]
        batch = StateBatch(
            np.arange(2), np.array([0, counts[0], sum(counts)]), np.array(sources), np.array(logged),
            np.array(writes, dtype=int).reshape(-1, 3), BLOCK, np.array(accepted) if any(accepted) else None,
            np.array(proposed) if any(proposed) else None,
        )  # fmt: skip
        out: Tensor = self.op(*inputs, self.rule.weights, self.states, self.log, self.plan_states(batch))
        return list(torch.split(out, counts))


def random_steps(draw: random.Random) -> Steps:
    """Return the steps of a row: a prompt, then decodes with as many proposed tokens as may be."""
    steps: Steps = []
    left = LENGTH
    while left:
        own = min(left, draw.choice([1, 1, 1, 40]) if steps else draw.randint(1, 30))
        proposed = draw.choice([0, 1, 5, MOST]) if own == 1 else 0
        accepted = min(left - own, draw.choice([0, proposed // 2, proposed]))
        steps.append((own, proposed, accepted))
        left -= own + accepted
    return steps


@pytest.fixture(params=["reference", "cpu_native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu_native" and library.load() is None:
        pytest.skip(f"no native kernels: {library.unavailable_reason()}")
    return str(request.param)


def check(rule: Rule, backend: Backend, steps: list[Steps]) -> None:
    torch.manual_seed(3)
    made = [[torch.randn(LENGTH, size) for size in rule.sizes] for _ in range(2)]
    whole, rows = Rows(rule, backend), Rows(rule, backend)
    expected = whole.step([torch.cat(both) for both in zip(*made, strict=True)], [LENGTH] * 2, [0, 0])
    found: list[list[Tensor]] = [[], []]
    for of_step in zip(*steps, strict=False):
        parts, counts, kept = [], [], []
        for row, (own, proposed, accepted) in enumerate(of_step):
            done, right = rows.computed[row], own + accepted
            wrong = [torch.randn(proposed - accepted, size) for size in rule.sizes]
            own_inputs = [each[done : done + right] for each in made[row]]
            parts.append([torch.cat(each) for each in zip(own_inputs, wrong, strict=True)])
            counts.append(own + proposed)
            kept.append(right)
        proposed_of = [proposed for _, proposed, _ in of_step]
        outputs = rows.step([torch.cat(both) for both in zip(*parts, strict=True)], counts, proposed_of)
        for row in range(2):
            found[row].append(outputs[row][: kept[row]])
            rows.computed[row] -= counts[row] - kept[row]
    tolerance = 0.0 if backend == "cpu_native" else 2e-5
    for row in range(2):
        out = torch.cat(found[row])
        torch.testing.assert_close(out, expected[row][: len(out)], atol=tolerance, rtol=0)
        for boundary in range(1, rows.boundaries[row] + 1):
            slot = rows.slot(row, boundary)
            state, right = rows.states[slot], whole.states[slot]
            torch.testing.assert_close(state, right, atol=tolerance * (1 + float(right.abs().max())), rtol=0)


def as_long(steps: list[Steps]) -> list[Steps]:
    least = min(map(len, steps))
    return [each[:least] for each in steps]


@pytest.mark.parametrize("name", RULES)
def test_tokens_that_are_taken_back_leave_no_trace(name: str, backend: Backend) -> None:
    for seed in range(6):
        draw = random.Random(seed)
        check(RULES[name], backend, as_long([random_steps(draw), random_steps(draw)]))


@pytest.mark.slow
def test_accepted_tokens_that_pass_a_block_are_folded_by_the_next_step(backend: Backend) -> None:
    """From every place in a block, with every number of accepted tokens."""
    for first in range(1, BLOCK + 1):
        for accepted in range(MOST + 1):
            steps: Steps = [(first, 0, 0), (1, MOST, accepted), (1, 0, 0), (1, 3, 1), (20, 0, 0)]
            other: Steps = [(first, 0, 0), (1, 0, 0), (1, MOST, MOST - accepted), (1, 0, 0), (20, 0, 0)]
            check(RULES["delta rule"], backend, [steps, other])
            check(RULES["convolution"], backend, [steps, other])


FAULTS: dict[str, tuple[str, Callable[[StateBatch], StateBatch]]] = {
    "a rejected token stays in the log": (
        "delta rule",
        lambda batch: batch._replace(num_logged=batch.num_logged + (batch.num_accepted is not None)),
    ),
    "a window is one token late": (
        "convolution",
        lambda batch: batch._replace(num_accepted=None if batch.num_accepted is None else batch.num_accepted - 1),
    ),
    "accepted tokens are not in the window": ("convolution", lambda batch: batch._replace(num_accepted=None)),
    "no room is kept for what may be taken back": ("convolution", lambda batch: batch._replace(num_proposed=None)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_detected(fault: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = FAULTS[fault]
    steps: list[Steps] = [[(13, 0, 0), (1, 6, 3), (1, 6, 6), (1, 0, 0)] for _ in range(2)]
    check(RULES[name], backend, steps)
    sound = Rows.step

    def step(rows: Rows, *args: Any) -> list[Tensor]:
        plan_states = rows.plan_states
        rows.plan_states = lambda batch: plan_states(change(batch))
        try:
            return sound(rows, *args)
        finally:
            rows.plan_states = plan_states

    monkeypatch.setattr(Rows, "step", step)
    with pytest.raises(AssertionError):
        check(RULES[name], backend, steps)


def test_a_log_that_does_not_move_with_its_state_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the reference; the native kernel has the comparison of every place above."""

    def unmoved(log: Tensor, new: Tensor, logged: Tensor, states: Any) -> None:
        log[states.new_rows, states.new_places] = new

    steps: list[Steps] = [[(13, 0, 0), (1, 8, 8), (1, 0, 0), (1, 0, 0)] for _ in range(2)]
    check(RULES["delta rule"], "reference", steps)
    monkeypatch.setattr(reference, "log_tokens", unmoved)
    with pytest.raises(AssertionError):
        check(RULES["delta rule"], "reference", steps)
