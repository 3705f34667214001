"""The step-time model learns step times from noisy steps, is never negative, and tolerates nonsense."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import MAX_KNOTS, StepSample, StepTimeModel, default_knots

StepMs = Callable[[int, int, int], float]


def gpu_step_ms(tokens: int, decode_context: int, products: int) -> float:
    """Return the step time of a GPU that is memory bound up to 64 tokens and compute bound beyond."""
    return 3.0 + 0.02 * min(tokens, 64) + 0.08 * max(0, tokens - 64) + 2e-5 * decode_context + 1e-6 * products


def cpu_step_ms(tokens: int, decode_context: int, products: int) -> float:
    return 12.0 + 1.5 * tokens + 4e-4 * decode_context + 2e-5 * products


def random_step(rng: random.Random) -> tuple[int, int, int]:
    decodes = rng.randint(0, 64)
    chunk = rng.randint(16, 512 - decodes) if rng.random() < 0.5 or not decodes else 0
    return decodes + chunk, decodes * rng.randint(10, 2000), chunk * rng.randint(0, 4000)


def observe_steps(model: StepTimeModel, step_ms: StepMs, steps: int, noise: float, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        step = random_step(rng)
        model.observe(*step, step_ms(*step) * rng.gauss(1.0, noise))


def worst_error(model: StepTimeModel, step_ms: StepMs) -> float:
    rng = random.Random(99)
    steps = [random_step(rng) for _ in range(300)]
    return max(abs(model.predict_ms(*step) / step_ms(*step) - 1) for step in steps)


@pytest.mark.parametrize("step_ms", [gpu_step_ms, cpu_step_ms])
def test_step_times_are_learned_despite_noise(step_ms: StepMs) -> None:
    model = StepTimeModel(512)
    observe_steps(model, step_ms, steps=3000, noise=0.1)
    assert worst_error(model, step_ms) < 0.05
    params = model.params()
    assert params.num_steps_observed == 3000
    assert 0.04 < params.error_p50 < 0.1
    assert params.error_p50 < params.error_p95 < 0.35


def test_outliers_do_not_change_the_model() -> None:
    model = StepTimeModel(512)
    rng = random.Random(3)
    for _ in range(3000):
        step = random_step(rng)
        hiccup = rng.choice([0.01, 20.0, 500.0]) if rng.random() < 0.03 else 1.0
        model.observe(*step, gpu_step_ms(*step) * rng.gauss(1.0, 0.05) * hiccup)
    assert worst_error(model, gpu_step_ms) < 0.05


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_wrong_first_step_is_soon_forgotten(factor: float) -> None:
    model = StepTimeModel(512)
    model.observe(100, 1000, 0, factor * cpu_step_ms(100, 1000, 0))
    observe_steps(model, cpu_step_ms, steps=500, noise=0.05)
    assert worst_error(model, cpu_step_ms) < 0.1


def test_a_prior_of_another_machine_is_soon_replaced() -> None:
    prior = StepTimeModel(512)
    observe_steps(prior, lambda *step: cpu_step_ms(*step) / 50, steps=500, noise=0.05)
    model = StepTimeModel.from_params(prior.params())
    observe_steps(model, cpu_step_ms, steps=500, noise=0.05)
    assert worst_error(model, cpu_step_ms) < 0.1


def test_the_model_follows_step_times_that_change() -> None:
    model = StepTimeModel(512)
    observe_steps(model, gpu_step_ms, steps=2000, noise=0.05)
    observe_steps(model, lambda *step: 3 * gpu_step_ms(*step), steps=1500, noise=0.05, seed=1)
    assert worst_error(model, lambda *step: 3 * gpu_step_ms(*step)) < 0.06


def test_an_hour_of_decodes_does_not_erase_what_was_learned_of_prefill() -> None:
    model = StepTimeModel(512)
    observe_steps(model, gpu_step_ms, steps=3000, noise=0.05)
    rng = random.Random(5)
    for _ in range(20_000):
        step = (8, rng.randint(1000, 9000), 0)
        model.observe(*step, gpu_step_ms(*step) * rng.gauss(1.0, 0.05))
    assert abs(model.predict_ms(512, 0, 512 * 1000) / gpu_step_ms(512, 0, 512 * 1000) - 1) < 0.1
    assert abs(model.predict_ms(8, 5000) / gpu_step_ms(8, 5000, 0) - 1) < 0.03


def test_a_calibration_sweep_is_a_good_prior() -> None:
    sizes = [1, 16, 64, 128, 256, 512]
    sweep = [StepSample(size, 0, 0, gpu_step_ms(size, 0, 0)) for size in sizes]
    sweep += [StepSample(8, context, 0, gpu_step_ms(8, context, 0)) for context in (1000, 50_000)]
    sweep += [StepSample(256, 0, 256 * context, gpu_step_ms(256, 0, 256 * context)) for context in (1000, 8000)]
    model = StepTimeModel.from_calibration(sweep)
    assert model.params().knots_tokens == [1, 8, 16, 64, 128, 256, 512]
    assert worst_error(model, gpu_step_ms) < 0.05


def test_calibration_without_a_usable_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="no usable sample"):
        StepTimeModel.from_calibration([StepSample(1, 0, 0, math.nan)])


def test_params_survive_a_round_trip() -> None:
    model = StepTimeModel(512)
    observe_steps(model, gpu_step_ms, steps=500, noise=0.05)
    copy = StepTimeModel.from_params(model.params())
    for step in [(1, 0, 0), (64, 5000, 0), (300, 100, 90_000), (5000, 0, 0)]:
        assert copy.predict_ms(*step) == pytest.approx(model.predict_ms(*step))
    assert copy.params().error_p95 == model.params().error_p95


def test_a_model_from_params_continues_to_learn() -> None:
    model = StepTimeModel(512)
    observe_steps(model, gpu_step_ms, steps=1000, noise=0.05)
    copy = StepTimeModel.from_params(model.params())
    observe_steps(copy, lambda *step: 2 * gpu_step_ms(*step), steps=1500, noise=0.05, seed=1)
    assert worst_error(copy, lambda *step: 2 * gpu_step_ms(*step)) < 0.06


def test_impossible_params_are_corrected() -> None:
    params = StepTimeParams(
        knots_tokens=[1, 8, 64], knot_ms=[5.0, 2.0, math.nan], decode_context_ms=-1.0, chunk_context_ms=math.inf
    )
    model = StepTimeModel.from_params(params)
    assert model.predict_ms(64, 10**6, 10**6) == 5.0


@pytest.mark.parametrize(
    "params",
    [
        StepTimeParams(knots_tokens=[1, 2], knot_ms=[1.0]),
        StepTimeParams(knots_tokens=[2, 1], knot_ms=[1.0, 2.0]),
        StepTimeParams(knots_tokens=[0, 1], knot_ms=[1.0, 2.0]),
    ],
)
def test_params_with_broken_knots_are_refused(params: StepTimeParams) -> None:
    with pytest.raises(ValueError, match="knots_tokens"):
        StepTimeModel.from_params(params)


@pytest.mark.parametrize("ms", [math.nan, math.inf, -1.0, 0.0])
def test_impossible_measurements_are_ignored(ms: float) -> None:
    model = StepTimeModel(512)
    observe_steps(model, gpu_step_ms, steps=200, noise=0.0)
    before = model.params()
    model.observe(64, 100, 0, ms)
    model.observe(0, 0, 0, 1.0)
    model.observe(4, -5, 0, 1.0)
    assert model.params() == before


def test_an_empty_step_takes_no_time_and_a_new_model_is_unknown() -> None:
    model = StepTimeModel(512)
    assert not model.known
    assert model.predict_ms(100) == 0.0
    model.observe(16, 0, 0, 10.0)
    assert model.known
    assert model.predict_ms(0) == 0.0
    assert model.predict_ms(16) == pytest.approx(10.0, rel=0.05)
    assert model.predict_ms(512) > model.predict_ms(16)


def test_beyond_the_last_knot_the_last_slope_continues() -> None:
    model = StepTimeModel.from_params(StepTimeParams(knots_tokens=[1, 100], knot_ms=[1.0, 100.0]))
    assert model.predict_ms(1000) == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("budget", "knots"), [(1, [1]), (8, [1, 4, 8]), (512, [1, 4, 8, 9, 16, 32, 64, 128, 256, 512])]
)
def test_the_last_default_knot_is_the_token_budget(budget: int, knots: list[int]) -> None:
    assert default_knots(budget) == knots
    assert len(default_knots(10**9)) == MAX_KNOTS


steps = st.tuples(
    st.integers(0, 600), st.integers(0, 10**7), st.integers(0, 10**9), st.floats(0.0, 1e6, allow_nan=False)
)


@settings(max_examples=num_examples(60), deadline=None)
@given(st.lists(steps, max_size=60), st.lists(steps, min_size=1, max_size=20))
def test_predictions_are_finite_never_negative_and_rise_with_tokens(
    observed: list[tuple[int, int, int, float]], asked: list[tuple[int, int, int, float]]
) -> None:
    model = StepTimeModel(512)
    for step in observed:
        model.observe(*step)
    for tokens, context, products, _ in asked:
        predicted = model.predict_ms(tokens, context, products)
        assert 0.0 <= predicted < math.inf
        assert model.predict_ms(tokens + 1, context, products) >= predicted * (1 - 1e-9)


def test_observing_is_cheap() -> None:
    model = StepTimeModel(2048)
    rng = random.Random(0)
    samples = [(*step, gpu_step_ms(*step)) for step in (random_step(rng) for _ in range(2000))]
    start_s = time.process_time()
    for sample in samples:
        model.observe(*sample)
    per_step_us = (time.process_time() - start_s) / len(samples) * 1e6
    assert per_step_us < 500  # 40 on an idle core; the limit detects only a change of the order of magnitude
