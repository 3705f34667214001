"""Predicted times of step sizes that never ran are bounded by the calibration and proportional to other sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_kernels.linear.native import BFLOAT16_ROWS
from pagemill_protocol.report.step_time import StepSample, StepTimeModel, default_knots

BUDGET = 512
SWEPT = (1, 8, 9, 16, 32, 64)
"""The sizes that a slow engine measures before it is ready."""


class StepTimes(NamedTuple):
    """The step times of an engine whose kernels change at some number of rows."""

    read_ms: float
    token_ms: float
    jump: float
    """The factor by which each further token is more expensive from `BFLOAT16_ROWS` on."""
    context_ms: float
    product_ms: float

    def ms(self, tokens: int, context: int, products: int) -> float:
        few = min(tokens, BFLOAT16_ROWS - 1)
        base = self.read_ms + self.token_ms * few
        if tokens > few:
            base = self.read_ms + self.token_ms * self.jump * tokens
        return base + self.context_ms * context + self.product_ms * products


MEASURED = StepTimes(10.0, 1.8, 1.5, 0.005, 0.0015)
"""Similar to SmolLM2-135M in 4 bits on one core."""
step_times = st.builds(
    lambda read_ms, token_ms, jump, context_share, product_share: StepTimes(
        read_ms, token_ms, jump, context_share * read_ms, product_share * token_ms
    ),
    st.floats(1, 30),
    st.floats(0.05, 3),
    st.floats(1, 2),
    st.floats(1e-6, 5e-4),
    st.floats(1e-6, 1e-3),
)
"""A token of context costs up to a two-thousandth of reading the weights; a pair of prompt tokens up to a thousandth of
a token.
"""


def steps(draw: random.Random, num_steps: int, most_seqs: int, longest: int) -> Iterator[tuple[int, int, int]]:
    """Yield steps that are mostly decodes, with some prompts of up to `longest` tokens."""
    for _ in range(num_steps):
        seqs = draw.randint(0, most_seqs)
        chunk = draw.randint(2, longest) if draw.random() < 0.05 or not seqs else 0
        yield seqs + chunk, seqs * draw.randint(20, 400), chunk * chunk


def calibrated(times: StepTimes, slow: Mapping[int, float], draw: random.Random, noise: float) -> StepTimeModel:
    """Return the model of an engine whose calibration measured each size `slow[size]` times as long."""
    sweep = [
        StepSample(size, 0, 0, factor * times.ms(size, 0, size**2) * draw.gauss(1, noise))
        for size, factor in slow.items()
    ]
    return StepTimeModel.from_calibration(sweep, BUDGET)


def learned(
    times: StepTimes, num_steps: int, *, seqs: int, longest: int, noise: float, slow: float = 1.0
) -> StepTimeModel:
    """Return the model of an engine that measured its calibration, `slow` times as long, and then ran these steps."""
    draw = random.Random(1)
    model = calibrated(times, dict.fromkeys(SWEPT, slow), draw, noise)
    for step in steps(draw, num_steps, seqs, longest):
        model.observe(*step, times.ms(*step) * draw.gauss(1, noise))
    return model


@pytest.mark.parametrize("num_steps", [0, 40, 169, 1000])
def test_predictions_beyond_all_steps_are_realistic(num_steps: int) -> None:
    """An engine of 169 steps with up to 136 tokens once predicted 37 s for 256 tokens."""
    model = learned(MEASURED, num_steps, seqs=3, longest=136, noise=0.1)
    for tokens in (200, 256, 384, 512):
        truth_ms = MEASURED.ms(tokens, 0, 0)
        assert 0.7 * truth_ms < model.predict_ms(tokens) < 1.4 * truth_ms


def test_step_times_learned_with_few_sequences_apply_to_many() -> None:
    model = learned(MEASURED, 800, seqs=4, longest=200, noise=0.05)
    for step in steps(random.Random(2), 200, 32, 500):
        assert model.predict_ms(*step) == pytest.approx(MEASURED.ms(*step), rel=0.15)


@settings(max_examples=num_examples(40), deadline=None)
@given(step_times, st.integers(0, 400), st.integers(1, 8), st.integers(2, 200), st.floats(0, 0.15))
def test_predictions_rise_with_tokens_and_contexts_and_stay_within_bounds(
    times: StepTimes, num_steps: int, seqs: int, longest: int, noise: float
) -> None:
    model = learned(times, num_steps, seqs=seqs, longest=longest, noise=noise)
    before_ms = 0.0
    for tokens in range(1, BUDGET + 100):
        ms = model.predict_ms(tokens)
        assert ms >= before_ms * (1 - 1e-9)
        before_ms = ms
        assert model.predict_ms(tokens, 1000) >= ms
        assert model.predict_ms(tokens, 0, 1000) >= ms
        assert times.ms(tokens, 0, 0) / 3 < ms < times.ms(tokens, 1000, tokens**2) * 3


@settings(max_examples=num_examples(20), deadline=None)
@given(step_times)
def test_any_engines_step_times_are_learned_within_their_noise(times: StepTimes) -> None:
    model = learned(times, 3000, seqs=16, longest=BUDGET - 16, noise=0.05)
    errors = sorted(
        abs(model.predict_ms(*step) / times.ms(*step) - 1) for step in steps(random.Random(2), 300, 16, BUDGET - 16)
    )
    assert errors[len(errors) // 2] < 0.03
    assert errors[-1] < 0.2


@pytest.mark.parametrize("slow", [0.4, 3.0])
def test_a_calibration_in_a_slow_phase_gives_the_ratios_of_sizes(slow: float) -> None:
    model = learned(MEASURED, 300, seqs=3, longest=60, noise=0.05, slow=slow)
    for tokens in (128, 256, 512):
        assert model.predict_ms(tokens) == pytest.approx(MEASURED.ms(tokens, 0, 0), rel=0.3)


@settings(max_examples=num_examples(40), deadline=None)
@given(
    step_times,
    st.fixed_dictionaries(dict.fromkeys((1, 16, 64), st.floats(1, 100))),
    st.integers(1, 300),
    st.integers(1, 16),
    st.booleans(),
)
@example(MEASURED, {1: 1.0, 16: 30.0}, 120, 4, True)
@example(MEASURED, {1: 1.0, 16: 30.0, 64: 1.0}, 40, 16, True)
@example(MEASURED, {1: 3.0, 16: 100.0}, 200, 16, False)
def test_an_unevenly_slow_calibration_leaves_a_time_without_context(
    times: StepTimes, slow: dict[int, float], num_steps: int, seqs: int, has_phase: bool
) -> None:
    """An engine that does not get the processor measures some sizes in seconds."""
    draw = random.Random(1)
    model = calibrated(times, slow, draw, 0.05)
    for number in range(num_steps):
        num_decodes = draw.randint(1, seqs)
        context = num_decodes * draw.randint(20, 400)
        phase = 50 if has_phase and number < num_steps // 2 else 1
        model.observe(num_decodes, context, 0, phase * times.ms(num_decodes, context, 0) * draw.uniform(0.9, 1.1))
        assert model.predict_ms(1) > 0.4 * times.ms(1, 0, 0)


def test_a_size_is_not_forgotten_while_other_sizes_run() -> None:
    draw = random.Random(3)
    model = learned(MEASURED, 1000, seqs=16, longest=400, noise=0.05)
    before_ms = model.predict_ms(300, 0, 300**2)
    for _ in range(20_000):
        context = draw.randint(20, 400)
        model.observe(1, context, 0, MEASURED.ms(1, context, 0) * draw.gauss(1, 0.05))
    assert model.predict_ms(300, 0, 300**2) == pytest.approx(before_ms, rel=0.02)


def test_knots_are_at_changes_of_native_kernels() -> None:
    assert {BFLOAT16_ROWS - 1, BFLOAT16_ROWS} <= set(default_knots(BUDGET))
