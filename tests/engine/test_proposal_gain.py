"""The number of proposed tokens is chosen by what a step costs: never far from the best fixed number.

The traces are those of SmolLM2's answers: for each output token, the agreement of the n-gram's proposal and how many of
16 proposed tokens followed (`bench/speculation.py --record`).
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_engine.proposing.acceptance import Acceptance
from pagemill_engine.proposing.draft import Rounds
from pagemill_engine.proposing.gain import LEAST_GAIN, MeasuredSteps, StepShape, can_gain, choose, most_of_same_rounding
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel

Trace = list[tuple[int, int]]
TRACES: dict[str, Trace] = {
    name: [(int(pair.split(":")[0]), int(pair.split(":")[1])) for pair in text.split()]
    for name, text in json.loads((Path(__file__).parent / "acceptance_traces.json").read_text()).items()
}
CHATS = [name for name in TRACES if name.startswith("chat")]
MOST = 8
DEVICES = {
    "cpu": ([1, 2, 4, 8, 9, 16, 32, 64, 512], [4.95, 5.5, 6.2, 10.0, 12.0, 18.6, 35.0, 69.0, 540.0]),
    "gpu": ([1, 8, 64, 256, 512], [8.0, 8.2, 9.0, 12.0, 22.0]),
    "knees": ([1, 8, 9, 16, 17, 64, 65, 512], [10.0, 10.5, 16.0, 16.5, 24.0, 30.0, 45.0, 200.0]),
}


def ms_of(device: str) -> StepTimeModel:
    knots, ms = DEVICES[device]
    return StepTimeModel.from_params(StepTimeParams(knots_tokens=knots, knot_ms=ms))


class Row:
    """A client that repeats a trace, each time as a new request."""

    def __init__(self, trace: Trace, engine: Acceptance, place: int) -> None:
        self.trace, self.place, self.engine, self.acceptance = trace, place, engine, Acceptance(engine)

    @property
    def found(self) -> int:
        """Tokens that may be proposed."""
        return min(MOST, len(self.trace) - self.place - 1) if self.trace[self.place][0] else 0

    def advance(self, num_proposed: int) -> int:
        """Sample tokens, and return how many."""
        agreement, num_right = self.trace[self.place]
        num_sampled = 1 + min(num_right, num_proposed)
        if self.found:
            num_known = min(self.found, num_sampled)
            self.acceptance.learn(agreement, min(num_right, num_known), num_known)
        self.place += num_sampled
        if self.place >= len(self.trace):
            self.place, self.acceptance = 0, Acceptance(self.engine)
        return num_sampled


def token_ms(traces: list[Trace], model: StepTimeModel, fixed: int | None) -> float:
    """Serve clients that never stop; return the milliseconds for each token. `fixed`: tokens proposed for each row;
    None: chosen."""
    engine, took_ms, num_tokens = Acceptance(), 0.0, 0
    rows = [Row(trace, engine, index * 7 % len(trace)) for index, trace in enumerate(traces)]
    shape = StepShape(len(rows), len(rows))
    while num_tokens < 600 * len(rows):
        if fixed is not None:
            numbers = [min(fixed, row.found) for row in rows]
        elif can_gain(len(rows), MOST, shape, model.predict_ms):
            chances = [row.acceptance.along(row.trace[row.place][0], row.found) for row in rows]
            numbers = choose(chances, shape, model.predict_ms)
        else:
            numbers = [0] * len(rows)
        took_ms += model.predict_ms(len(rows) + sum(numbers))
        num_tokens += sum(row.advance(number) for row, number in zip(rows, numbers, strict=True))
    return took_ms / num_tokens


WORK = {
    "quote": [TRACES["quote"]],
    "edit": [TRACES["edit"]],
    "chat": [TRACES["chat"]],
    "eight": [trace for _, trace in zip(range(8), itertools.cycle(TRACES.values()), strict=False)],
    "batch of 32": [TRACES[name] for _, name in zip(range(32), itertools.cycle(CHATS), strict=False)],
    "32 edits": [TRACES["edit"]] * 32,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("work", WORK)
def test_the_choice_is_within_five_percent_of_the_best_fixed_number(device: str, work: str) -> None:
    traces, model = WORK[work], ms_of(device)
    fixed = [token_ms(traces, model, number) for number in range(MOST + 1)]
    chosen = token_ms(traces, model, None)
    assert chosen <= min(fixed) * 1.05, (chosen, fixed)
    assert chosen <= fixed[0] * 1.01, "proposals never cost much more than none"


def test_quotes_gain_and_a_batch_that_is_bound_by_computation_proposes_nothing() -> None:
    model = ms_of("cpu")
    assert token_ms(WORK["quote"], model, None) * 1.8 < token_ms(WORK["quote"], model, 0)
    assert not can_gain(200, MOST, StepShape(200, 200), model.predict_ms)
    assert can_gain(1, MOST, StepShape(1, 1), model.predict_ms)


chances_of_rows = st.lists(
    st.lists(st.floats(0.01, 0.99), max_size=8).map(lambda each: list(itertools.accumulate(each, float.__mul__))),
    min_size=1,
    max_size=4,
)


@given(chances=chances_of_rows, device=st.sampled_from(sorted(DEVICES)), more=st.integers(0, 40), turn=st.floats(0, 9))
def test_no_other_numbers_are_expected_to_be_better(
    chances: list[list[float]], device: str, more: int, turn: float
) -> None:
    """Every total is tried with its likeliest tokens, and nothing is proposed for less than the least gain."""
    model, num_rows = ms_of(device), len(chances) + more
    shape = StepShape(num_rows, num_rows)
    numbers = choose(chances, shape, model.predict_ms, turn)

    def rate(each: list[int]) -> float:
        tokens = num_rows + sum(sum(row[:number]) for row, number in zip(chances, each, strict=True))
        return tokens / ((turn if any(each) else 0.0) + model.predict_ms(num_rows + sum(each)))

    if any(numbers):
        assert rate(numbers) > LEAST_GAIN * rate([0] * len(chances))
    flat = sorted(((-chance, place, row) for row, each in enumerate(chances) for place, chance in enumerate(each)))
    for total in range(1, len(flat) + 1):
        other = [sum(1 for _, _, row in flat[:total] if row == index) for index in range(len(chances))]
        assert rate(other) <= max(rate(numbers), LEAST_GAIN * rate([0] * len(chances))) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("num_tokens", "num_sampling", "rounding_rows", "most"),
    [(1, 1, (), None), (1, 1, (9,), 7), (8, 8, (9,), 0), (9, 9, (9,), None), (9, 9, (9, 24), 14), (300, 3, (9, 24), 5)],
)
def test_no_step_gets_other_roundings_by_proposals(
    num_tokens: int, num_sampling: int, rounding_rows: tuple[int, ...], most: int | None
) -> None:
    """Neither its layers, which compute all its tokens, nor its logits, of those that sample."""
    shape = StepShape(num_tokens, num_sampling)
    assert most_of_same_rounding(shape, rounding_rows) == most
    if most is not None:
        chosen = choose([[0.99**place for place in range(1, 17)]] * num_sampling, shape, lambda *_: 1.0, most=most)
        assert sum(chosen) == most


def test_a_knee_that_the_model_does_not_know_is_measured_in_a_few_steps() -> None:
    """Eight rows and one proposed token take half as long again as eight rows, and not a little longer."""
    model = ms_of("gpu")
    shape, measured, num_tried = StepShape(8, 8), MeasuredSteps(), 0
    for _ in range(2000):
        numbers = choose([[0.8]] * 8, shape, model.predict_ms, factor=measured.factor)
        ms = 12.3 if any(numbers) else 8.2
        num_tried += any(numbers)
        measured.record(8 + sum(numbers), model.predict_ms(8 + sum(numbers)), ms, proposed=any(numbers))
    assert num_tried == 2000, "eight tokens more for half the time are worth it"

    num_tried, measured = 0, MeasuredSteps()
    for _ in range(2000):
        numbers = choose([[0.8]], shape, model.predict_ms, factor=measured.factor)
        ms = 12.3 if any(numbers) else 8.2
        num_tried += any(numbers)
        measured.record(8 + sum(numbers), model.predict_ms(8 + sum(numbers)), ms, proposed=any(numbers))
    assert 1 <= num_tried <= 8, "one token more for half the time is not, and is tried again at times"


def test_a_slow_machine_is_no_knee() -> None:
    """Where all steps take twice as long, those with proposed tokens are worth as much as before."""
    model, measured = ms_of("cpu"), MeasuredSteps()
    for number in range(200):
        size = 3 if number % 3 else 1
        measured.record(size, model.predict_ms(size), 2 * model.predict_ms(size), proposed=size > 1)
    assert measured.factor(3) == pytest.approx(1.0, abs=0.05)
    assert measured.factor(300) == 1.0


def test_nothing_is_proposed_while_nothing_is_known_about_the_device() -> None:
    assert choose([[0.9, 0.8]], StepShape(1, 1), StepTimeModel().predict_ms) == [0, 0][:1]


def test_chances_follow_what_was_sampled() -> None:
    """A text that is copied and one that only looks like it are distinguished within a few proposals."""
    engine = Acceptance()
    copied, other = Acceptance(engine), Acceptance(engine)
    before = engine.along(3, 4)
    for _ in range(12):
        copied.learn(3, 4, 4)
        other.learn(3, 0, 1)
    assert copied.along(3, 4)[3] > before[3] > other.along(3, 4)[3]
    assert copied.along(3, 1)[0] > 0.8
    assert other.along(3, 1)[0] < 0.3
    assert other.along(3, 1)[0] < engine.along(3, 1)[0] < copied.along(3, 1)[0]
    assert all(later <= earlier for earlier, later in itertools.pairwise(copied.along(3, 8)))


class DraftedRow:
    """A request whose drafted tokens are right with one chance, whatever was drafted before."""

    def __init__(self, right: float, seed: int, engine: Acceptance) -> None:
        self.draw, self.right, self.acceptance = random.Random(seed), right, Acceptance(engine)
        self.is_right: list[bool] = []
        self.place = 0

    def advance(self, num_drafted: int, num_verified: int) -> int:
        """Sample tokens, and return how many. Learns from those that were drafted and are known then."""
        while len(self.is_right) < self.place + num_drafted:
            self.is_right.append(self.draw.random() < self.right)
        drafted = [*self.is_right[self.place : self.place + num_drafted], False]
        num_right = drafted.index(False)
        num_sampled = 1 + min(num_right, num_verified)
        num_known = min(num_drafted, num_sampled)
        if num_known:
            self.acceptance.learn(0, min(num_right, num_known), num_known)
        self.place += num_sampled
        return num_sampled


def drafted_token_ms(device: str, rights: list[float], round_share: float, fixed: int | None, seed: int) -> float:
    """Decode with drafts; return the milliseconds for each token. `round_share`: of a step without. `fixed`: tokens
    drafted and verified for each row; None: chosen."""
    most, model, shape = 6, ms_of(device), StepShape(len(rights), len(rights))
    engine, rounds, round_ms = Acceptance(), Rounds(most), round_share * model.predict_ms(len(rights))
    rows = [DraftedRow(right, 100 * seed + index, engine) for index, right in enumerate(rights)]
    took_ms, num_tokens, num_drafted = 0.0, 0, 0
    while num_tokens < 1200 * len(rights) ** 0.75:
        if fixed is None:
            chances = [row.acceptance.along(0, num_drafted) for row in rows]
            numbers = choose(chances, shape, model.predict_ms)
            num_next = rounds.choose([row.acceptance for row in rows], shape, model.predict_ms, 0.0)
        else:
            numbers, num_next = [num_drafted] * len(rows), fixed
        took_ms += model.predict_ms(len(rows) + sum(numbers)) + num_next * round_ms
        rounds.record(num_next, num_next * round_ms)
        num_tokens += sum(row.advance(num_drafted, number) for row, number in zip(rows, numbers, strict=True))
        num_drafted = num_next
    return took_ms / num_tokens


def beside_the_best(device: str, rights: list[float], round_share: float, seed: int) -> float:
    """Return the time of the choice as a multiple of that of the best fixed number."""
    fixed = [drafted_token_ms(device, rights, round_share, number, seed) for number in range(7)]
    return drafted_token_ms(device, rights, round_share, None, seed) / min(fixed)


CASES = [*itertools.product((0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97), (0.02, 0.1, 0.2, 0.5))]
"""Chances, and what a round takes as a share of a step."""
OTHERS = [(8, 1, 9), (4, 0, 3), (2, 1, 3), (32, 2, 9), (64, 3, 14)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_rows", "first", "step"),
    [(1, 2, 6), (8, 4, 14), *(pytest.param(*each, marks=pytest.mark.full) for each in OTHERS)],
)
def test_as_many_tokens_are_drafted_as_gain(device: str, num_rows: int, first: int, step: int) -> None:
    """Within 5 % of the best fixed number, where each token is right alike."""
    for index, (right, share) in enumerate(CASES[first::step]):
        assert beside_the_best(device, [right] * num_rows, share, index) <= 1.05, (right, share)


def test_where_requests_differ_the_choice_is_better_than_the_best_fixed_number() -> None:
    assert beside_the_best("cpu", [0.2, 0.95] * 2, 0.02, 1) < 0.9
    assert beside_the_best("cpu", [0.2, 0.95] * 2, 0.2, 1) <= 1.05
    assert beside_the_best("knees", [0.2, 0.95] * 2, 0.02, 1) < 0.9


def test_what_is_drafted_only_to_learn_loses_little() -> None:
    """Tokens that are never right cost one part in forty at most, and those that become right are found soon."""
    model, shape, rounds, acceptance = ms_of("cpu"), StepShape(1, 1), Rounds(6), Acceptance()
    numbers = []
    for index in range(3000):
        num = rounds.choose([acceptance], shape, model.predict_ms, 0.0)
        rounds.record(num, 0.1 * num * model.predict_ms(1))
        numbers.append(num)
        if num:
            acceptance.learn(0, num if index >= 2000 else 0, num)
    assert 10 < sum(numbers[:2000]) * 0.1 < 2000 / 40
    assert min(numbers[2500:]) == 6
