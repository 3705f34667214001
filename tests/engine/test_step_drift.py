"""The drift of step times: a slow phase is noticed within a few steps, forgotten afterwards, and not learned."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_engine.loop.step_timer import FORGOTTEN_S, StepDrift, drift_factor
from pagemill_protocol.report.step_time import StepTimeModel

STEP_S = 0.02


def drift_after(num_steps: int, slower: float, *, with_prompt: bool = False) -> tuple[StepDrift, float]:
    drift, now_s = StepDrift(), 100.0
    for _ in range(num_steps):
        now_s += STEP_S
        drift.observe(20.0, 20.0 * slower, now_s, with_prompt=with_prompt)
    return drift, now_s


def test_without_steps_the_step_time_model_applies_unchanged() -> None:
    assert StepDrift().value(5.0) == 0.0
    assert drift_factor(0.0, with_prompt=False) == drift_factor(0.0, with_prompt=True) == 1.0


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.4])
def test_a_slow_phase_is_followed_within_ten_steps(slower: float) -> None:
    drift, now_s = drift_after(10, slower)
    assert drift_factor(drift.value(now_s), with_prompt=False) == pytest.approx(slower, rel=0.01)


def test_steps_with_prompts_are_slowed_half_as_much() -> None:
    drift, now_s = drift_after(10, 1.44)
    assert drift_factor(drift.value(now_s), with_prompt=True) == pytest.approx(1.2, rel=0.01)
    drift, now_s = drift_after(60, 1.2, with_prompt=True)
    assert drift_factor(drift.value(now_s), with_prompt=False) == pytest.approx(1.44, rel=0.02)


def test_the_drift_of_an_idle_engine_decays() -> None:
    drift, now_s = drift_after(10, 1.4)
    assert drift.value(now_s + FORGOTTEN_S) == pytest.approx(drift.value(now_s) / math.e)
    assert drift.value(now_s + 20 * FORGOTTEN_S) == pytest.approx(0.0, abs=1e-6)


def test_the_step_time_model_learns_a_permanent_change_but_not_a_phase() -> None:
    model, drift, now_s = StepTimeModel(64), StepDrift(), 0.0

    def steps(count: int, ms: float) -> None:
        nonlocal now_s
        for _ in range(count):
            now_s += ms / 1000
            model.observe(1, 10, 0, drift.observe(model.predict_ms(1, 10), ms, now_s, with_prompt=False))

    steps(600, 20.0)
    assert model.predict_ms(1, 10) == pytest.approx(20.0, rel=0.02)
    steps(30, 30.0)
    assert model.predict_ms(1, 10) == pytest.approx(20.0, rel=0.03)
    assert model.predict_ms(1, 10) * drift_factor(drift.value(now_s), with_prompt=False) == pytest.approx(30, rel=0.03)
    steps(3000, 30.0)
    assert model.predict_ms(1, 10) == pytest.approx(30.0, rel=0.05)


@given(st.lists(st.tuples(st.floats(), st.floats(), st.booleans())))
def test_the_drift_stays_within_its_bounds_for_any_measurement(steps: list[tuple[float, float, bool]]) -> None:
    drift = StepDrift()
    for i, (predicted_ms, ms, with_prompt) in enumerate(steps):
        drift.observe(predicted_ms, ms, i * STEP_S, with_prompt=with_prompt)
    assert 0.4 < drift_factor(drift.value(len(steps) * STEP_S), with_prompt=False) < 2.1
