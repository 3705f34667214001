"""The policy that knows what comes: ready in time, never early by more than it must, and gone when it is over."""

from __future__ import annotations

import pytest

from pagemill_operator.autoscaler.prediction import OfferedLoad, Predictor
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.autoscaler.signals import Fleet, Shape, Signals
from pagemill_operator.autoscaler.slo import fewest
from pagemill_protocol.state import StepTimeParams
from pagemill_simulator.scaling.clairvoyant import WINDOW_S, Clairvoyant
from pagemill_simulator.scaling.policy import Bounds, Seen
from pagemill_simulator.scaling.simulated import rival
from pagemill_simulator.workloads.request import SimRequest, Workload
from pagemill_simulator.workloads.shapes import Step

SHAPE = Shape(
    num_blocks=8000,
    block_size=16,
    max_num_seqs=128,
    max_step_tokens=2048,
    step_time=StepTimeParams(knots_tokens=[1, 512, 2048], knot_ms=[6.0, 22.0, 80.0], decode_context_ms=1e-5),
)
SLO = Slo(ttft_ms=1000, tpot_ms=60)
COLD_START_S = 120.0


def answers(workload: Workload, bounds: Bounds, until_s: float, *, num_open: int = 0) -> dict[float, int]:
    floor = Clairvoyant(bounds.max_replicas, workload, cold_start_s=COLD_START_S, shape=SHAPE, slo=SLO)
    policy = rival(floor, bounds)
    times = [policy.interval_s * tick for tick in range(int(until_s / policy.interval_s))]
    return {at_s: policy.decide(seen(at_s, num_open)) for at_s in times}


def seen(at_s: float, num_open: int) -> Seen:
    return Seen(
        at_s=at_s,
        wanted=0,
        pods=(),
        num_held=num_open,
        num_arrived=0,
        num_prompt_tokens_arrived=0,
        num_output_tokens_made=0,
        signals=Signals(at_s=at_s, fleet=Fleet(wanted=0)),
    )


def needed(rate: float) -> int:
    return fewest(Predictor(SHAPE, SLO.share), OfferedLoad(rate, 1155, 1155, 3000, 211), SLO, 100, {})


def test_replicas_for_a_step_are_ordered_one_cold_start_ahead() -> None:
    workload = Step(from_rate=2, to_rate=20, at_s=600, duration_s=1200).workload(1)
    course = answers(workload, Bounds(1, 100), 1400)
    low, high = needed(2), needed(20)
    assert low < high
    early_s = COLD_START_S + WINDOW_S
    before = [count for at_s, count in course.items() if at_s < 600 - early_s - 10]
    after = [count for at_s, count in course.items() if 600 - COLD_START_S <= at_s < 1200 - COLD_START_S - 10]
    assert max(before) < high
    assert min(after) >= high - 1
    assert course[1395.0] == 1, "the least, when everything is over"


def test_a_pause_shorter_than_a_cold_start_is_waited_out_and_a_longer_one_is_not() -> None:
    def bursts(pause_s: float) -> Workload:
        begins = [300.0, 300.0 + 60.0 + pause_s]
        requests = [SimRequest(begin + 0.02 * each, 1000, 200) for begin in begins for each in range(3000)]
        return Workload(name="bursts", source="drawn", requests=requests, duration_s=requests[-1].arrival_s)

    short, long = (answers(bursts(pause_s), Bounds(0, 100), 1000) for pause_s in (60.0, 400.0))
    assert min(short[at_s] for at_s in short if 300 <= at_s < 480) > 1
    assert min(long[at_s] for at_s in long if 300 <= at_s < 700) == 0
    assert short[0.0] == 0
    assert short[140.0] == 0
    assert short[180.0] > 1


def test_the_last_replica_stays_while_something_is_open() -> None:
    nothing = Workload(name="nothing", source="drawn", requests=[], duration_s=10)
    assert set(answers(nothing, Bounds(0, 5), 100, num_open=3).values()) == {1}
    assert set(answers(nothing, Bounds(0, 5), 100).values()) == {0}
    assert set(answers(nothing, Bounds(2, 5), 100).values()) == {2}


def test_bounds_hold_and_step_times_must_be_known() -> None:
    workload = Step(from_rate=50, to_rate=200, at_s=60, duration_s=120).workload(1)
    assert set(answers(workload, Bounds(1, 3), 100).values()) == {3}
    with pytest.raises(ValueError, match="step times"):
        Clairvoyant(3, workload, cold_start_s=1, shape=Shape(10, 16), slo=SLO)


def test_turns_of_a_session_cost_only_what_is_new() -> None:
    def turns(session: int | None) -> Workload:
        requests = [SimRequest(0.5 * turn, 2000 + 300 * turn, 50, session) for turn in range(40)]
        return Workload(name="turns", source="drawn", requests=requests, duration_s=20)

    alone, together = (max(answers(turns(session), Bounds(0, 100), 30).values()) for session in (None, 7))
    assert together < alone
