"""The simulation of an engine's steps until a prompt's first token, on examples that can be computed by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_gateway.brain.endpoints.dispatches import Dispatch, Dispatches
from pagemill_gateway.brain.endpoints.ttft_estimator import TtftEstimator
from pagemill_gateway.routing.step_simulation import PendingPrompt, StepSimulation
from pagemill_protocol.state import EngineLoad, StepTimeParams
from pagemill_protocol.step_time import StepTimeModel

# A step takes 10 ms and 0.1 ms for each token.
MODEL = StepTimeModel.from_params(StepTimeParams(knots_tokens=[1, 1001], knot_ms=[10.1, 110.1]))
BUDGET = 100


def simulation(*, num_answers: int = 0, overlaps: bool = True) -> StepSimulation:
    one = StepSimulation(MODEL, BUDGET, overlaps=overlaps)
    one.num_answers = num_answers
    return one


def through_ms(one: StepSimulation, at_ms: float, num_tokens: int) -> float:
    return 1000 * one.first_token_s(PendingPrompt(at_ms / 1000, num_tokens))


def test_an_idle_engine_starts_the_prompt_at_once() -> None:
    assert through_ms(simulation(), 5, 50) == pytest.approx(5 + 15)


def test_a_long_prompt_takes_as_many_steps_as_the_token_budget_requires() -> None:
    assert through_ms(simulation(), 0, 250) == pytest.approx(20 + 20 + 15)


def test_a_request_that_arrives_during_a_step_waits_for_it_and_for_the_scheduled_next_one() -> None:
    one = simulation(num_answers=10)
    one.begin(0.0, 30.0, 0.0)
    # The times are those of the rest of the step, of one with ten answers, and of one with those and the prompt.
    assert through_ms(one, 12, 40) == pytest.approx(30 + 11 + (11 + 4))


def test_without_overlap_a_request_is_computed_in_the_next_step() -> None:
    one = simulation(num_answers=10, overlaps=False)
    one.begin(0.0, 30.0, 0.0)
    assert through_ms(one, 12, 40) == pytest.approx(30 + (11 + 4))


def test_earlier_prompts_are_computed_first_and_then_decode() -> None:
    one = simulation(num_answers=10)
    one.queue.append(PendingPrompt(0.0, 150))
    one.begin(0.0, 30.0, 0.0)
    # The next step has 90 tokens of the first prompt; the one after it the other 60 and 30 of the new prompt, which
    # then needs one more step, with 11 answers in it.
    assert through_ms(one, 1, 70) == pytest.approx(30 + 20 + 20 + (10 + 1.1 + 4))


def test_an_engine_with_slow_latest_steps_is_slower_and_prompts_half_as_much() -> None:
    one = StepSimulation(MODEL, BUDGET, overlaps=False, drift=math.log(1.44))
    one.num_answers = 10
    one.begin(0.0, 0.0, 0.0)
    # The step that begins has ten answers, the next one those and the prompt.
    assert through_ms(one, 1, 40) == pytest.approx(11 * 1.44 + 15 * 1.2)


def test_a_prediction_changes_no_state_and_time_that_has_passed_is_caught_up() -> None:
    one = simulation(num_answers=10)
    one.begin(0.0, 30.0, 0.0)
    first = through_ms(one, 200, 40)
    assert through_ms(one, 200, 40) == first
    one.advance(0.2)
    assert through_ms(one, 200, 40) == pytest.approx(first)
    # Steps of 11 ms begin at 30 ms: one ends at 206.
    assert first == pytest.approx(206 + 11 + 15)


def test_a_step_that_takes_longer_than_predicted_runs_until_the_next_report() -> None:
    one = simulation(num_answers=10)
    one.begin(0.0, 30.0, 0.046)
    assert through_ms(one, 45, 40) == pytest.approx(46 + 11 + 15)


def test_a_very_long_prompt_gets_a_prediction() -> None:
    one = simulation(num_answers=50)
    one.begin(0.0, 15.0, 0.0)
    assert through_ms(one, 0, 10**6) == pytest.approx(10**6 / 50 * 20, rel=0.01)


def test_delays_outside_of_steps_are_learned_from_first_tokens() -> None:
    ttft_estimator = TtftEstimator()
    load = EngineLoad(num_requests_running=10, step_in_flight_ms=30.0)
    for number in range(20):
        now_s = 10.0 * number
        ttft_estimator.received(load, 5.0, MODEL, BUDGET, [], [], now_s)
        predicted_ms = ttft_estimator.ttft_ms(number, Dispatch(40), now_s)
        ttft_estimator.accepted(number, now_s + 0.004)
        # 25 ms of the step are left; the 7 ms of the way back belong to no step.
        ttft_estimator.started(number, 25 + 11 + 15 + 7)
    assert predicted_ms == pytest.approx(25 + 11 + 15 + 7)


def test_a_request_sent_since_the_report_delays_the_next_one() -> None:
    ttft_estimator = TtftEstimator()
    ttft_estimator.received(
        EngineLoad(num_requests_running=10, step_in_flight_ms=30.0), 0.0, MODEL, BUDGET, [], [], 0.0
    )
    alone_ms = ttft_estimator.ttft_ms(1, Dispatch(40), 0.001)
    behind_ms = ttft_estimator.ttft_ms(2, Dispatch(40), 0.002)
    assert alone_ms == pytest.approx(30 + 11 + 15 - 1)
    assert behind_ms == pytest.approx(30 + 11 + 19 - 2)


def test_an_ended_answer_frees_the_rows_of_all_its_sequences() -> None:
    ttft_estimator = TtftEstimator()
    ttft_estimator.received(
        EngineLoad(num_requests_running=10, step_in_flight_ms=30.0), 0.0, MODEL, BUDGET, [], [], 0.0
    )
    ttft_estimator.ended(7, 0)
    ttft_estimator.ended(8, 3)
    # The scheduled step still has all ten rows, the next one seven.
    assert ttft_estimator.ttft_ms(1, Dispatch(40), 0.0) == pytest.approx(30 + 11 + 14.7)


def test_only_sequences_that_have_begun_to_decode_are_rows() -> None:
    dispatches = Dispatches()
    dispatches.sent(1, Dispatch(10, num_sequences=3))
    assert dispatches.num_answers(1) == 0
    dispatches.computed(1)
    assert dispatches.num_answers(1) == 3
    dispatches.ended(1)
    assert dispatches.num_answers(1) == 0


def test_an_engine_without_a_step_time_model_gets_no_prediction() -> None:
    ttft_estimator = TtftEstimator()
    assert ttft_estimator.ttft_ms(1, Dispatch(40), 0.0) is None
    ttft_estimator.received(EngineLoad(), 0.0, None, BUDGET, [], [], 0.0)
    assert ttft_estimator.ttft_ms(2, Dispatch(40), 0.0) is None


def test_requests_that_a_report_does_not_include_are_the_newest() -> None:
    dispatches = Dispatches()
    for number in range(5):
        dispatches.sent(number, Dispatch(10 + number))
    dispatches.reported(2)
    assert dispatches.unreported() == [(3, Dispatch(13)), (4, Dispatch(14))]
    assert dispatches.waiting(2) == [Dispatch(11), Dispatch(12)]
    assert dispatches.waiting(0) == []
    assert dispatches.waiting(4) is None


@settings(deadline=None)
@given(
    overlaps=st.booleans(),
    num_answers=st.integers(1, 60),
    num_context_tokens=st.integers(0, 100_000),
    running_ms=st.floats(0.5, 40.0),
    until_ms=st.floats(1.0, 3_000.0),
)
def test_decodes_that_are_skipped_end_at_the_same_time_as_one_by_one(
    overlaps: bool, num_answers: int, num_context_tokens: int, running_ms: float, until_ms: float
) -> None:
    model = StepTimeModel.from_params(
        StepTimeParams(knots_tokens=[1, 1001], knot_ms=[10.1, 110.1], decode_context_ms=1e-4)
    )
    at_once, in_turn = (StepSimulation(model, BUDGET, overlaps=overlaps) for _ in range(2))
    for each in (at_once, in_turn):
        each.num_answers, each.num_context_tokens = num_answers, num_context_tokens
        each.begin(0.0, running_ms, 0.0)
    at_once.advance(until_ms / 1000)
    for millisecond in range(1, int(until_ms) + 1):
        in_turn.advance(millisecond / 1000)
    in_turn.advance(until_ms / 1000)
    assert at_once.num_context_tokens == pytest.approx(in_turn.num_context_tokens, abs=num_answers)
    assert through_ms(at_once, until_ms, 70) == pytest.approx(through_ms(in_turn, until_ms, 70), abs=1e-6)
