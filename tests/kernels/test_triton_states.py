"""Triton's kernels of recurrent layers equal their references: any steps, tokens that are taken back, odd shapes.

On a GPU the same tests run there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from pagemill_kernels.recurrent import reference, state_space, triton_launch
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_kernels.recurrent.plan import plan_states
from pagemill_kernels.recurrent.reference import Convolution, DeltaHeads
from pagemill_kernels.recurrent.state_space import StateSpaceHeads

BLOCK, TOLERANCE = 16, 1e-5
"""The tolerance is that of the largest value."""
RULES: dict[str, Callable[..., Tensor]] = {
    "delta_rule": reference.delta_rule,
    "channel_delta_rule": reference.channel_delta_rule,
    "state_space": state_space.state_space,
}
Change = Callable[[StateBatch], StateBatch]


class Shape(NamedTuple):
    rule: str
    keys: int
    values: int
    key_dim: int
    value_dim: int
    width: int
    norm_size: int = 0
    """Of state spaces: values that are normalised together; 0: none."""
    gates_first: bool = True
    bias: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.keys * self.key_dim + self.values * self.value_dim

    def given(self, count: int) -> tuple[Tensor, ...]:
        """Return random inputs: those of the convolution, then the others of the rule."""
        of_values = self.values * self.value_dim
        sizes = {
            "delta_rule": (2 * self.values, of_values),
            "channel_delta_rule": (self.values, self.values * self.key_dim, of_values),
            "state_space": (self.values, of_values),
        }[self.rule]
        return tuple(torch.randn(count, size) for size in (self.channels, *sizes))

    def heads(self) -> Any:
        decays = -torch.linspace(0.001, 0.5, self.values)
        if self.rule == "state_space":
            norm = None if not self.norm_size else torch.rand(self.values * self.value_dim) + 0.5
            limits = (0.0, float("inf"))
            skips, size = torch.randn(self.values), self.norm_size or 1
            return StateSpaceHeads(decays, torch.randn(self.values), skips, norm, size, 1e-3, self.gates_first, limits)
        by_channel = self.rule == "channel_delta_rule"
        biases = torch.randn(self.values * (self.key_dim if by_channel else 1)) - 3
        return DeltaHeads(decays, biases, torch.rand(self.value_dim) + 0.5, 1e-3, 1.0 if by_channel else 1.5)

    @property
    def log_size(self) -> int:
        decays = self.values * (self.key_dim if self.rule == "channel_delta_rule" else 1)
        return self.keys * self.key_dim + self.values * self.value_dim + decays


SHAPES = {
    "delta rule": Shape("delta_rule", 2, 6, 8, 12, 4),
    "delta rule, windows of 1": Shape("delta_rule", 3, 3, 16, 16, 2),
    "decays by channel": Shape("channel_delta_rule", 3, 3, 8, 20, 4),
    "state space, norm of all": Shape("state_space", 1, 6, 24, 12, 4, 72, bias=True),
    "state space, norm first": Shape("state_space", 2, 4, 16, 8, 3, 16, gates_first=False, bias=True),
    "state space, norm of heads": Shape("state_space", 2, 4, 16, 8, 3, 8),
    "state space without a norm": Shape("state_space", 2, 4, 16, 8, 4),
}


class Rows:
    """Two rows with states in slots, of the kernels or of the reference."""

    def __init__(self, shape: Shape, kernel: Convolution, heads: Any, most: int, length: int, on: torch.device) -> None:
        self.shape, self.on = shape, on
        self.kernel = Convolution(*(each.to(on) if isinstance(each, Tensor) else each for each in kernel))
        self.heads = type(heads)(*(each.to(on) if isinstance(each, Tensor) else each for each in heads))
        self.num_slots = 2 * (length // BLOCK)

        def empty(*sizes: int) -> Tensor:  # nothing is read that was not written
            return torch.full(sizes, torch.nan, device=on)

        self.states = empty(self.num_slots + 1, shape.values, shape.key_dim, shape.value_dim)
        self.windows = empty(self.num_slots + 1, shape.width - 1, shape.channels)
        self.states[-1], self.windows[-1] = 0, 0
        self.log = empty(2, BLOCK + most, shape.log_size)
        self.inputs = empty(2, shape.width - 1 + most, shape.channels)
        self.computed, self.boundaries, self.known = [0, 0], [0, 0], [0, 0]
        self.change: Change = lambda batch: batch

    def slot(self, row: int, boundary: int) -> int:
        return 2 * (boundary - 1) + row if boundary else self.num_slots

    def batch(self, counts: list[int], proposed: list[int]) -> StateBatch:
        writes = []
        computed = np.array(self.computed)
        logged = computed - BLOCK * np.array(self.boundaries)
        sources = [self.slot(row, boundary) for row, boundary in enumerate(self.boundaries)]
        accepted = computed - np.array(self.known)
        for row in range(2):
            first = self.boundaries[row]
            self.known[row] = self.computed[row] + counts[row] - proposed[row]
            self.boundaries[row] = self.known[row] // BLOCK
            writes += [(row, end - first, self.slot(row, end)) for end in range(first + 1, self.boundaries[row] + 1)]
            self.computed[row] += counts[row]
        return StateBatch(
            np.arange(2), np.array([0, counts[0], sum(counts)]), np.array(sources), logged,
            np.array(writes, dtype=int).reshape(-1, 3), BLOCK, accepted if any(accepted) else None,
            np.array(proposed) if any(proposed) else None, computed,
        )  # fmt: skip

    def step(self, given: tuple[Tensor, ...], counts: list[int], proposed: list[int]) -> list[Tensor]:
        x, *others = (each.to(self.on) for each in given)
        batch = self.batch(counts, proposed)
        if self.on is CPU:
            plan = plan_states(batch)
            x = reference.causal_convolution(x, self.kernel, self.windows, self.inputs, plan)
            out = RULES[self.shape.rule](x, *others, self.heads, self.states, self.log, plan)
        else:
            caches = self.states, self.windows, self.log, self.inputs
            plan_of_device = triton_launch.plan_states(self.change(batch))
            out = triton_launch.convolved_rule(
                self.shape.rule, x, self.kernel, (*others, self.heads), caches, plan_of_device
            )
        return list(torch.split(out.cpu(), counts))


CPU, ON_DEVICE = torch.device("cpu"), torch.device(DEVICE)


def both(shape: Shape, most: int, length: int) -> tuple[Rows, Rows]:
    torch.manual_seed(5)
    kernel = Convolution(torch.randn(shape.width, shape.channels), torch.randn(shape.channels) if shape.bias else None)
    heads = shape.heads()
    device, whole = (Rows(shape, kernel, heads, most, length, on) for on in (ON_DEVICE, CPU))
    return device, whole


Steps = list[tuple[int, int, int]]
"""Of each step: its own tokens, proposed ones, and of these the accepted ones."""


def random_steps(draw: random.Random, length: int, most: int) -> Steps:
    steps: Steps = []
    left = length
    while left:
        own = min(left, draw.choice([1, 1, 1, 21]) if steps else draw.randint(1, 30))
        proposed = draw.choice([0, 0, 5, most]) if own == 1 and most > 1 else 0
        accepted = min(left - own, draw.choice([0, proposed // 2, proposed]))
        steps.append((own, proposed, accepted))
        left -= own + accepted
    return steps


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE * (float(expected.abs().max()) + 1e-3), rtol=0)


def check(shape: Shape, steps: list[Steps], most: int, length: int, change: Change = lambda batch: batch) -> None:
    """Compare steps of the kernels with all tokens at once in the reference."""
    rows, whole = both(shape, most, length)
    rows.change = change
    made = [shape.given(length) for _ in range(2)]
    expected = whole.step(tuple(torch.cat(parts) for parts in zip(*made, strict=True)), [length] * 2, [0, 0])
    for of_step in zip(*steps, strict=False):
        parts, counts, kept, begins = [], [], [], list(rows.computed)
        for row, (own, proposed, accepted) in enumerate(of_step):
            right = own + accepted
            wrong = shape.given(proposed - accepted)
            own_inputs = (each[begins[row] : begins[row] + right] for each in made[row])
            parts.append(tuple(torch.cat(each) for each in zip(own_inputs, wrong, strict=True)))
            counts.append(own + proposed)
            kept.append(right)
        joined = tuple(torch.cat(each) for each in zip(*parts, strict=True))
        outputs = rows.step(joined, counts, [proposed for _, proposed, _ in of_step])
        for row in range(2):
            close(outputs[row][: kept[row]], expected[row][begins[row] : begins[row] + kept[row]])
            rows.computed[row] -= counts[row] - kept[row]
    for row in range(2):
        for boundary in range(1, rows.boundaries[row] + 1):
            slot = rows.slot(row, boundary)
            close(rows.states[slot], whole.states[slot])
            assert torch.equal(rows.windows[slot].cpu(), whole.windows[slot])


def as_long(steps: list[Steps]) -> list[Steps]:
    least = min(map(len, steps))
    return [each[:least] for each in steps]


CROSSING: list[Steps] = [
    [(9, 0, 0), *[(1, 0, 0)] * 9, (1, 4, 4), (1, 0, 0), (20, 0, 0)],
    [(18, 0, 0), *[(1, 0, 0)] * 9, (1, 4, 1), (1, 0, 0), (17, 0, 0)],
]
"""Blocks are completed by prompts, by single tokens and by accepted ones."""
QUICK = Shape("delta_rule", 1, 2, 8, 12, 4)
FEW: list[Steps] = [[(15, 0, 0), (1, 0, 0), (1, 0, 0), (3, 0, 0)], [(3, 0, 0), (1, 0, 0), (1, 0, 0), (15, 0, 0)]]


def test_few_steps_give_what_the_reference_gives_at_once() -> None:
    check(QUICK, FEW, 1, 32)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_any_steps_give_what_the_reference_gives_at_once(name: str) -> None:
    check(SHAPES[name], CROSSING, 4, 64)


@pytest.mark.full
@pytest.mark.parametrize("most", [1, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_random_steps_give_what_the_reference_gives_at_once(name: str, most: int) -> None:
    draw = random.Random(name)
    check(SHAPES[name], as_long([random_steps(draw, 150, most), random_steps(draw, 150, most)]), most, 150)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_heads_of_published_sizes(rule: str) -> None:
    """As of Qwen3.5, Kimi Linear and Nemotron 3, in an interpreter's hours."""
    of_rule = {
        "delta_rule": Shape("delta_rule", 16, 32, 128, 128, 4),
        "channel_delta_rule": Shape("channel_delta_rule", 32, 32, 128, 128, 4),
        "state_space": Shape("state_space", 8, 64, 128, 64, 4, 512, bias=True),
    }[rule]
    check(of_rule, CROSSING, 4, 64)


@pytest.mark.slow
def test_4096_tokens_in_chunks_equal_the_recurrence() -> None:
    """In float64, token by token, as the delta rule is written; the kernels' chunks and single tokens follow it."""
    shape, length = Shape("delta_rule", 1, 1, 16, 16, 4), 4096
    rows, _ = both(shape, 1, length)
    made = shape.given(length)
    given = tuple(each[: length - 8] for each in made)
    found = [rows.step(tuple(torch.cat((each, each[:16])) for each in given), [length - 8, 16], [0, 0])[0]]
    for at in range(length - 8, length):
        one = tuple(each[at : at + 1].repeat(2, 1) for each in made)
        found.append(rows.step(one, [1, 1], [0, 0])[0])
    close(torch.cat(found), recurrence(rows, made))


def recurrence(rows: Rows, made: tuple[Tensor, ...]) -> Tensor:
    """Return the outputs of a delta rule with one head, token by token."""
    shape, heads = rows.shape, rows.heads
    taps, padded = rows.kernel.taps.cpu().double(), torch.cat((torch.zeros(3, shape.channels), made[0])).double()
    x = torch.nn.functional.silu(sum(padded[tap : tap + len(made[0])] * taps[tap] for tap in range(4)))
    q, k, v = x.split(16, 1)
    q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    rates, gates = (each.double() for each in made[1:])
    rate = heads.rate_scale * rates[:, 0].sigmoid()
    decay = heads.decays.cpu().double() * torch.nn.functional.softplus(rates[:, 1:] + heads.biases.cpu().double())
    state, out = torch.zeros(16, 16, dtype=torch.float64), []
    for at in range(len(x)):
        state = state * decay[at].exp()
        state = state + rate[at] * torch.outer(k[at], v[at] - state.T @ k[at])
        out.append(state.T @ q[at] / 4)
    o = torch.stack(out)
    o = o * (o.square().mean(1, keepdim=True) + heads.eps).rsqrt() * heads.norm.cpu().double()
    return (o * torch.nn.functional.silu(gates)).float()[:, None]


def test_a_short_convolution_equals_the_reference() -> None:
    """Alone, without a rule: in steps of one token it is one launch that also keeps its inputs."""
    torch.manual_seed(1)
    kernel = Convolution(torch.randn(3, 130), torch.randn(130), activated=False)
    x, rows = torch.randn(40, 130), np.zeros(1, dtype=int)
    expected = sum(torch.nn.functional.pad(x, (0, 0, 2, 0))[tap : tap + 40] * kernel.taps[tap] for tap in range(3))
    windows, inputs = (torch.full((3, size, 130), torch.nan, device=DEVICE) for size in (2, 3))
    windows[2] = 0
    on = Convolution(kernel.taps.to(DEVICE), kernel.bias.to(DEVICE), activated=False)  # type: ignore[union-attr]
    boundary, slot, at = 0, 2, 0
    for count in (5, *[1] * 12, 18, 1, 1, 3):
        ends = range(boundary + 1, (at + count) // BLOCK + 1)
        writes = [(0, end - boundary, end - 1) for end in ends]
        batch = StateBatch(
            rows, np.array([0, count]), np.array([slot]), np.array([at - boundary * BLOCK]),
            np.array(writes, dtype=int).reshape(-1, 3), BLOCK, num_computed=np.array([at]),
        )  # fmt: skip
        plan = triton_launch.plan_states(batch)
        out = triton_launch.causal_convolution(x[at : at + count].to(DEVICE), on, windows, inputs, plan)
        close(out, expected[at : at + count] + kernel.bias)
        at += count
        if ends:
            boundary, slot = ends[-1], ends[-1] - 1
    assert torch.equal(windows[:2].cpu(), torch.stack([x[14:16], x[30:32]]))


def from_another(batch: StateBatch) -> StateBatch:
    """Begin a row with the state of another one."""
    return batch._replace(sources=np.where(batch.num_computed == 0, 0, batch.sources))


def one_late(batch: StateBatch) -> StateBatch:
    """Fold all but one token of a block that single tokens complete."""
    late = (batch.num_logged == BLOCK - 1).astype(int)
    return batch._replace(num_logged=batch.num_logged - late, num_computed=batch.num_computed - late)


FAULTS: dict[str, Change] = {
    "a state is not zeroed at admission": from_another,
    "a snapshot is one token late": one_late,
    "a window is shifted": lambda batch: batch._replace(num_computed=batch.num_computed + (batch.num_computed == 16)),
    "a block is folded twice": lambda batch: batch._replace(
        num_logged=batch.num_logged + BLOCK * (batch.num_logged == 0) * (batch.num_computed > 0)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    def change(batch: StateBatch) -> StateBatch:
        return FAULTS[fault](batch)

    with pytest.raises(AssertionError):
        check(QUICK, FEW, 1, 32, change)
