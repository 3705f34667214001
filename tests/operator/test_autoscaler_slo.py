"""The SLO mode: predictions, the required number of replicas, and the significance of changes."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_world import BLOCK_SIZE, BLOCKS, LENGTHS, SEATS, STEP_TIME, Scaled, arrivals, engines, signals

from examples import num_examples
from pagemill_operator.autoscaler.decision import Goal
from pagemill_operator.autoscaler.expected_load import expected_load, is_burst
from pagemill_operator.autoscaler.memory import LONGEST_TREND_S, Memory, Rate
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo
from pagemill_operator.autoscaler.signals import Fleet, Signals
from pagemill_operator.autoscaler.slo import STEADY_MISSES, meets, slo_target
from pagemill_protocol.report.histogram import histogram_of
from pagemill_protocol.report.load import Lengths, QueueLoad
from pagemill_protocol.report.prediction import OfferedLoad, Predictor
from pagemill_protocol.report.shape import Shape, shape_of
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import in_rounds

SHAPE = Shape(BLOCKS, BLOCK_SIZE, SEATS, 512, STEP_TIME)
DEMAND = OfferedLoad(
    requests_per_s=4.0, prompt_tokens=500, computed_tokens=500, computed_tokens_high=900, output_tokens=200
)
SLO = ScalingSettings("Active", 1, 20, slo=Slo(ttft_ms=500.0, tpot_ms=40.0))


def test_an_idle_replicas_ttft_is_the_time_of_its_steps() -> None:
    prediction = Predictor(SHAPE, 0.95).predict(msgspec.structs.replace(DEMAND, requests_per_s=1e-6), 1)
    assert prediction.tpot_ms == pytest.approx(10.0, rel=0.05)
    # 900 tokens are a full step of 511 and one of 389, after half a step until the first begins.
    assert prediction.ttft_ms == pytest.approx(5 + 60 + 46, rel=0.1)


def test_the_steady_state_follows_littles_law() -> None:
    """Without prefill, a step of B requests takes 10 + 4 B / 63 ms, and B is 4 x 200 times that in seconds."""
    demand = OfferedLoad(4.0, 1, 0, 1, 200)
    step_ms = 10 / (1 - 4 / 63 * 0.8) * (1 - 4 / 63 / 10)
    median = Predictor(SHAPE, 0.5).predict(demand, 1)
    assert median.tpot_ms == pytest.approx(step_ms, rel=0.02)
    assert Predictor(SHAPE, 0.99).predict(demand, 1).tpot_ms > median.tpot_ms


def test_proposed_tokens_that_are_right_make_answers_of_fewer_steps() -> None:
    """Two tokens a step halve the time per token and the requests that decode at once; what is computed in vain makes
    steps longer."""

    def predicted(sampled: float, computed: float, draft_ms: float = 0.0) -> float:
        step_time = msgspec.structs.replace(
            STEP_TIME, tokens_per_decode=sampled, computed_per_decode=computed, draft_ms=draft_ms
        )
        shape = msgspec.structs.replace(SHAPE, step_time=step_time)
        return Predictor(shape, 0.5).predict(OfferedLoad(4.0, 1, 0, 1, 200), 1).tpot_ms

    assert predicted(1.0, 1.0) == Predictor(SHAPE, 0.5).predict(OfferedLoad(4.0, 1, 0, 1, 200), 1).tpot_ms
    # Half of the steps hold half of the requests.
    assert predicted(2.0, 1.0) == pytest.approx(10 / (1 - 4 / 63 * 0.4) * (1 - 4 / 63 / 10) / 2, rel=0.02)
    assert predicted(2.0, 1.0) < predicted(2.0, 4.0) < predicted(1.0, 1.0)
    # Drafting is as much of each step as a fixed part of it: 10 ms more double the time.
    assert predicted(2.0, 1.0, 10.0) == pytest.approx(20 / (1 - 4 / 63 * 0.4) * (1 - 4 / 63 / 20) / 2, rel=0.02)


rates = st.floats(0.01, 200.0)


@settings(max_examples=num_examples(60))
@given(rates, st.integers(1, 50), st.floats(1, 4000), st.floats(1, 1000))
def test_more_replicas_are_never_slower_and_more_load_is_never_faster(
    rate: float, replicas: int, prompt: float, output: float
) -> None:
    predictor = Predictor(SHAPE, 0.95)
    demand = OfferedLoad(rate, prompt, prompt, prompt * 1.5, output)
    fewer, more = predictor.predict(demand, replicas), predictor.predict(demand, replicas + 1)
    assert more.ttft_ms <= fewer.ttft_ms * 1.001
    assert more.tpot_ms <= fewer.tpot_ms * 1.001
    loaded = predictor.predict(demand.times(1.3), replicas)
    assert loaded.ttft_ms >= fewer.ttft_ms * 0.999


@settings(max_examples=num_examples(60))
@given(st.floats(0.1, 50.0), st.integers(1, 12), st.lists(st.floats(0.5, 3.0), min_size=1, max_size=6))
def test_a_slow_replica_makes_no_prediction_shorter_and_more_replicas_none_longer(
    rate: float, replicas: int, slowness: list[float]
) -> None:
    demand = msgspec.structs.replace(DEMAND, requests_per_s=rate)

    def predicted(slowness: list[float], replicas: int) -> tuple[float, float]:
        shape = msgspec.structs.replace(SHAPE, slowness=tuple(sorted(slowness)))
        found = Predictor(shape, 0.95).predict(demand, replicas)
        return found.ttft_ms, found.tpot_ms

    alike = predicted([max(slowness)] * len(slowness), replicas)
    mixed, more = predicted(slowness, replicas), predicted(slowness, replicas + 1)
    fastest = predicted([1.0], replicas)
    for index in range(2):
        assert mixed[index] <= alike[index] * 1.001, "faster replicas relieve the slowest"
        assert more[index] <= mixed[index] * 1.001
        if min(slowness) >= 1.0:
            assert mixed[index] >= fastest[index] * 0.999


def test_equal_replicas_of_another_speed_are_predicted_as_one_model_scaled() -> None:
    """Twice the reference's time for every replica is the same as a reference with twice the times."""
    twice = msgspec.structs.replace(
        STEP_TIME,
        knot_ms=[2 * each for each in STEP_TIME.knot_ms],
        decode_context_ms=2 * STEP_TIME.decode_context_ms,
        chunk_context_ms=2 * STEP_TIME.chunk_context_ms,
    )
    scaled = Predictor(msgspec.structs.replace(SHAPE, step_time=twice), 0.95).predict(DEMAND, 3)
    slow = Predictor(msgspec.structs.replace(SHAPE, slowness=(2.0, 2.0)), 0.95).predict(DEMAND, 3)
    assert (slow.ttft_ms, slow.tpot_ms) == pytest.approx((scaled.ttft_ms, scaled.tpot_ms))


def test_the_slowest_replica_may_be_late_for_more_of_its_requests_than_the_fleet() -> None:
    """Of two replicas the slower one, which takes 1.6 times as long, gets 5 of 13 requests."""

    def predicted(slowness: tuple[float, ...], share: float, rate: float, replicas: int) -> float:
        demand = msgspec.structs.replace(DEMAND, requests_per_s=rate)
        return Predictor(msgspec.structs.replace(SHAPE, slowness=slowness), share).predict(demand, replicas).ttft_ms

    mixed = predicted((1.0, 1.6), 0.98, 4.0, 2)
    rate_of_two_slow = 2 * 4.0 * 5 / 13
    assert mixed < predicted((1.6, 1.6), 0.98, rate_of_two_slow, 2)
    only_slow_ones_late = 1 - 0.02 * 13 / 5
    assert mixed > predicted((1.6, 1.6), only_slow_ones_late, rate_of_two_slow, 2)
    assert predicted((1.0, 1.6), 0.98, 4.0, 1) == predicted((1.6, 1.6), 0.98, 4.0, 1), "the slow one may remain alone"


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([], ()),
        ([1.0], ()),
        ([0.9, 1.0, 1.1], ()),
        ([1.6, 1.0], (1.0, 1.6)),
        ([1.0, math.inf, -1.0, math.nan], ()),
    ],
    ids=str,
)
def test_replicas_count_as_unequal_only_beyond_what_their_models_differ_by_learning(
    ratios: list[float], expected: tuple[float, ...]
) -> None:
    shape = shape_of(msgspec.structs.replace(engines(1), step_time_ratios=ratios))
    assert shape is not None
    assert shape.slowness == expected


@pytest.mark.parametrize(
    ("changes", "limit"),
    [({"num_bytes": 20}, "blocks"), ({"max_num_seqs": 4}, "maxNumSeqs"), ({"max_step_tokens": 8}, "steps")],
    ids=str,
)
def test_an_overloaded_fleet_has_no_latency_and_the_reason_is_given(changes: dict[str, int], limit: str) -> None:
    shape = msgspec.structs.replace(SHAPE, **changes)
    prediction = Predictor(shape, 0.95).predict(DEMAND, 1)
    assert math.isinf(prediction.tpot_ms)
    assert prediction.limit in (limit, "tokens")


@pytest.mark.slow
def test_the_smallest_number_that_meets_the_slo_is_chosen_and_candidates_are_recorded() -> None:
    scaled = Scaled(SLO, replicas=1)
    decision = scaled.decide(rate=30.0, active=1.0)
    shares = sorted({candidate.share for candidate in decision.candidates})
    assert shares == pytest.approx([0.95, 0.98]), "the SLO's percentile, and one that leaves misses for changes"
    weighed = {each.replicas: each for each in decision.candidates if each.share == shares[1]}
    assert decision.replicas > 2, "several replicas are added at once"
    assert weighed[decision.replicas].meets
    assert not weighed[decision.replicas - 1].meets
    scaled.run(3000, lambda at, ready: {"rate": 30.0, "active": 0.3 * ready})
    assert scaled.changes == [(1, decision.replicas)], "the number must not change while the load stays"
    scaled.run(3000, lambda at, ready: {"rate": 3.0, "active": 0.3})
    assert scaled.wanted < decision.replicas


def staged(num_stages: int) -> StepTimeParams:
    """Return what an engine with stages reports that have equal parts of the model of `STEP_TIME`."""
    parts = [each / num_stages for each in STEP_TIME.knot_ms]
    return msgspec.structs.replace(STEP_TIME, knot_ms=parts, stages=num_stages)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_replica_with_stages_counts_as_one_whose_steps_are_rounds(num_stages: int) -> None:
    """All stages compute at the same time, so it serves more than one process does, and less than as many replicas;
    each request passes all of them."""
    load = {"rate": 60.0, "active": 0.5}

    def needed(step_time: StepTimeParams) -> int:
        return Scaled(SLO, replicas=1).decide(engines=engines(1, step_time=step_time, active=0.5), **load).replicas

    of_rounds = in_rounds(staged(num_stages))
    assert of_rounds.stages == 1
    assert needed(staged(num_stages)) == needed(of_rounds)
    assert needed(staged(num_stages)) < needed(STEP_TIME)
    ignored = msgspec.structs.replace(staged(num_stages), stages=1)
    assert needed(ignored) < needed(staged(num_stages)), "a step of one stage is not a token of each request"
    alone = Predictor(msgspec.structs.replace(SHAPE, step_time=staged(num_stages)), 0.5)
    tpot_ms = alone.predict(msgspec.structs.replace(DEMAND, requests_per_s=1e-6), 1).tpot_ms
    assert tpot_ms == pytest.approx(num_stages * staged(num_stages).knot_ms[0], rel=0.05)


def test_ranks_that_share_each_layer_count_by_the_times_that_they_report() -> None:
    """A replica of two ranks whose steps take 0.6 of one's needs at most as many replicas as 0.6 of the load does."""
    shared = msgspec.structs.replace(STEP_TIME, knot_ms=[0.6 * each for each in STEP_TIME.knot_ms])

    def needed(step_time: StepTimeParams, rate: float) -> int:
        decision = Scaled(SLO, replicas=1).decide(engines=engines(1, step_time=step_time), rate=rate)
        return decision.replicas

    assert needed(shared, 60.0) < needed(STEP_TIME, 60.0)
    assert needed(shared, 60.0) <= needed(STEP_TIME, 36.0)


def test_beyond_the_maximum_the_best_prediction_is_named() -> None:
    policy = msgspec.structs.replace(SLO, max_replicas=3)
    decision = Scaled(policy, replicas=1).decide(rate=400.0)
    assert decision.replicas == 3
    assert decision.unreachable.startswith("3 replicas do not reach ttft 500 ms and tpot 40 ms: ")
    assert decision.unreachable.endswith("raise maxReplicas or the SLO")


def test_an_slo_that_no_request_meets_orders_no_replicas_beyond_the_load() -> None:
    policy = msgspec.structs.replace(SLO, max_replicas=3, slo=Slo(ttft_ms=1.0, tpot_ms=1.0))
    decision = Scaled(policy, replicas=1).decide(rate=1.0)
    assert decision.replicas == 1
    assert "a replica that serves a single request does not reach ttft 1 ms and tpot 1 ms" in decision.unreachable
    assert Scaled(policy, replicas=1).decide(rate=400.0).replicas == 3


@settings(max_examples=num_examples(30))
@given(st.integers(6, 45), st.floats(1.0, 4.0))
def test_prompts_that_no_number_of_replicas_serves_in_time_order_none(percent_long: int, rate: float) -> None:
    """The rest of the prompts are planned for as if they were a smaller SLO's."""
    computed = histogram_of([500.0] * (100 - percent_long) + [12_000.0] * percent_long)
    mixed = msgspec.structs.replace(LENGTHS, computed=computed)
    decision = Scaled(SLO, replicas=1).decide(rate=rate, lengths=mixed)
    share = 100 - percent_long - (100 - percent_long) % 5
    assert f"for more than {share} % of the requests" in decision.unreachable
    smaller = msgspec.structs.replace(SLO, slo=msgspec.structs.replace(SLO.slo, share=share / 100))
    assert decision.demand == Scaled(smaller, replicas=1).decide(rate=rate, lengths=mixed).demand


def test_requests_that_will_still_wait_are_served_within_a_cold_start() -> None:
    calm = Scaled(SLO, replicas=1).decide(rate=2.0)
    loaded = Scaled(SLO, replicas=1).decide(rate=2.0, queue=QueueLoad(num_requests=600, num_tokens=10))
    assert loaded.replicas > calm.replicas


def test_a_queue_that_will_be_gone_adds_no_replicas() -> None:
    fleet = Fleet(wanted=1, ready=1, cold_start_s=60.0)
    fields: dict[str, Any] = {"fleet": fleet, "arrivals": arrivals(2.0), "queue": QueueLoad(num_requests=100)}
    remembered = Memory(shape=SHAPE)
    found = expected_load(signals(1, **fields), remembered)
    assert (found.num_waiting, found.requests_per_s) == (0.0, 2.0)
    fields["queue"] = QueueLoad(num_requests=2000)
    alone = expected_load(signals(1, **fields), remembered).num_waiting
    fields["fleet"] = Fleet(wanted=2, ready=1, loading=1, starting_s=30.0, cold_start_s=60.0)
    joined = expected_load(signals(1, **fields), remembered).num_waiting
    assert 0 < joined < alone, "starting replicas serve a part of the queue"


def test_the_reason_states_what_fewer_replicas_would_miss() -> None:
    decision = Scaled(SLO, replicas=1, cold_start_s=30.0).decide(rate=40.0)
    goal = next(goal for goal in decision.goals if goal.name == "slo")
    found = re.search(r"with 1, (\d+) requests/min would miss ttft 500 ms and tpot 40 ms from 30 s on", goal.reason)
    assert found is not None
    assert 0 < int(found[1]) < 60 * 40


@settings(max_examples=num_examples(30))
@given(st.floats(1.0001, 1.018), st.integers(1, 3), st.floats(10.0, 4000.0))
def test_a_shortage_below_the_accuracy_of_the_rate_adds_nothing(over: float, replicas: int, slowness: float) -> None:
    """The load is just above the replicas' capacity, from hundreds of requests per minute to less than one."""
    slow = msgspec.structs.replace(STEP_TIME, knot_ms=[slowness / 10 * each for each in STEP_TIME.knot_ms])
    slo = Slo(ttft_ms=20 * slowness, tpot_ms=4 * slowness)
    policy = msgspec.structs.replace(SLO, slo=slo)
    share = 1 - STEADY_MISSES * (1 - slo.share)
    predictor = Predictor(msgspec.structs.replace(SHAPE, step_time=slow), share)
    demand = OfferedLoad(1.0, *(each.mean() or 0.0 for each in (LENGTHS.prompt, LENGTHS.computed)), 0.0, 0.0)
    demand = msgspec.structs.replace(
        demand,
        computed_tokens_high=LENGTHS.computed.quantile(share) or 0.0,
        output_tokens=LENGTHS.output.mean() or 0.0,
    )
    held = predictor.highest_rate(demand, replicas, lambda found: meets(found, slo))

    def goal(rate: float) -> Goal:
        fields = {"arrivals": arrivals(rate), "engines": engines(replicas, step_time=slow)}
        now = signals(replicas, **fields)
        memory = Memory(shape=msgspec.structs.replace(SHAPE, step_time=slow))
        return slo_target(policy, slo, now, memory, expected_load(now, memory)).goal

    # The search ends within 2 % of the rate; up to 2 % above that, no replica is added.
    assert goal(held * over).needed <= replicas
    many = goal(held * 8)
    if held < 0.2:
        return  # a minute has too few arrivals to determine the rate
    assert many.needed > replicas
    missed = re.search(r"([\d.]+) requests/min would miss", many.reason)
    assert missed is not None
    assert float(missed[1]) > 0


@pytest.mark.parametrize(
    "fields", [{"lengths": Lengths()}, {"engines": engines(2, step_time=StepTimeParams())}], ids=["lengths", "steps"]
)
def test_without_a_prediction_the_load_is_kept_in_bounds_and_nothing_is_removed(fields: dict[str, Any]) -> None:
    scaled = Scaled(SLO, replicas=2)
    scaled.run(1000, lambda at, ready: {"rate": 2.0, **fields})
    assert scaled.wanted == 2
    assert scaled.decisions[-1].reason == "SignalsMissing"
    full = scaled.decide(rate=2.0, **fields, queue=QueueLoad(num_requests=50, num_tokens=10))
    assert full.replicas > 2


def rate(now: Signals, memory: Memory) -> float:
    return expected_load(now, memory).requests_per_s


def counted(rates: list[float]) -> Memory:
    """Return a memory of past windows of six seconds."""
    ages = range(len(rates) - 1, -1, -1)
    return Memory(
        shape=SHAPE, counts=tuple(Rate(1000.0 - 6 * age, each) for age, each in zip(ages, rates, strict=True))
    )


def starting_in(cold_start_s: float) -> Fleet:
    return Fleet(wanted=1, ready=1, cold_start_s=cold_start_s)


def test_a_rise_is_extrapolated_over_a_start_by_as_much_as_it_has_lasted_of_it() -> None:
    """The rate has risen for two minutes by 0.05 requests/s each second, to 9 requests/s."""
    rising = counted([3.0] * 20 + [3.0 + 0.3 * index for index in range(1, 21)])
    now, soon, then, later, last = (
        rate(signals(1, arrivals=arrivals(7.5), fleet=starting_in(each)), rising)
        for each in (0.0, 60.0, 120.0, 300.0, 6000.0)
    )
    assert now == pytest.approx(9.0, rel=0.05)
    assert soon == pytest.approx(now + 60 * 0.05, rel=0.1)
    assert then == pytest.approx(now + 120 * 0.05, rel=0.1)
    assert later == pytest.approx(now + 120 * 0.05 * 120 / 300, rel=0.1)
    assert last == pytest.approx(now, rel=0.05)
    steep = counted([0.1] * 45 + [1.0, 2.0, 4.0, 6.0, 9.0])
    present = rate(signals(1, arrivals=arrivals(4.0), fleet=starting_in(0.0)), steep)
    assert rate(signals(1, arrivals=arrivals(4.0), fleet=starting_in(600.0)), steep) <= 3 * present


def test_few_arrivals_count_by_their_lower_bound() -> None:
    fields = {"fleet": starting_in(60.0)}
    few, many = (
        expected_load(signals(1, **fields, arrivals=arrivals(each)), counted([each] * 10)) for each in (0.3, 3.0)
    )
    assert few.arrivals_lower_bound_per_s < 0.7 * few.arrivals_per_s
    assert many.arrivals_lower_bound_per_s > 0.8 * many.arrivals_per_s


def test_a_replica_that_would_be_ordered_again_by_chance_is_kept() -> None:
    """Just below the load that needs a third replica, three are kept, and longer where fewer arrivals determine it."""

    def goal(rate: float) -> Goal:
        now, memory = signals(3, arrivals=arrivals(rate)), msgspec.structs.replace(counted([rate] * 10), shape=SHAPE)
        return slo_target(SLO, SLO.slo or Slo(), now, memory, expected_load(now, memory)).goal

    low, high = 1.0, 50.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if goal(middle).needed <= 2 else (low, middle)
    assert goal(0.99 * low).needed == 2
    assert goal(0.99 * low).settled == 3
    assert goal(0.5 * low).settled == 2
    bounds = [expected_load(signals(3), counted([each] * 10)).upper_bound for each in (0.5, 5.0, 50.0)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > 1.1
    assert 1.0 < bounds[2] < 1.05


def test_before_there_are_counts_the_latest_minute_is_the_rate() -> None:
    assert rate(signals(1, arrivals=arrivals(5.0), fleet=starting_in(60.0)), Memory(shape=SHAPE)) == 5.0


def test_the_lengths_of_a_single_answer_add_nothing() -> None:
    known = signals(1).lengths
    once = msgspec.structs.replace(
        known, output=histogram_of([400]), computed=histogram_of([6000]), prompt=histogram_of([6000])
    )
    few = Scaled(SLO, replicas=1).decide(rate=2.0, active=0.1, lengths=once)
    assert few.replicas == 1
    many = msgspec.structs.replace(
        known, output=histogram_of([400] * 100), computed=histogram_of([6000] * 100), prompt=histogram_of([6000] * 100)
    )
    assert Scaled(SLO, replicas=1).decide(rate=2.0, active=0.1, lengths=many).replicas > 1


def test_before_a_request_is_known_at_most_twice_the_replicas_run() -> None:
    decision = Scaled(SLO, replicas=1).decide(
        rate=2.0, lengths=Lengths(), queue=QueueLoad(num_requests=50, num_tokens=10)
    )
    assert decision.replicas == 2


def test_counts_of_the_past_minutes_are_kept_without_gaps_or_overlap() -> None:
    memory = Memory()
    for second in range(0, 1000, 2):
        now = msgspec.structs.replace(signals(1, arrivals=arrivals(5.0)), at_s=float(second))
        memory = memory.with_count(now)
    ages = [998.0 - count.at_s for count in memory.counts]
    assert LONGEST_TREND_S - 10 <= ages[0] <= LONGEST_TREND_S + 6
    assert all(before - after == 6 for before, after in itertools.pairwise(ages))


@pytest.mark.parametrize(
    ("rate", "burst", "expected"),
    [(0.0, 1 / 6, False), (1.0, 1.9, False), (1.0, 20.0, True), (10.0, 14.0, False), (10.0, 100.0, True)],
)
def test_a_burst_is_a_significant_doubling_of_the_rate(rate: float, burst: float, expected: bool) -> None:
    assert is_burst(signals(1, arrivals=arrivals(rate, burst=burst)), Memory()) is expected


def test_clustered_arrivals_alone_are_neither_a_burst_nor_a_rise() -> None:
    clusters = [0.5, 9.0, 1.0, 0.0, 6.0, 8.0, 0.5, 2.0, 11.0, 0.0] * 3
    fleet = Fleet(wanted=1, ready=1, cold_start_s=60.0)
    burst = signals(1, arrivals=arrivals(4.0, burst=10.0), fleet=fleet)
    assert is_burst(burst, Memory())
    assert not is_burst(burst, counted(clusters))
    assert is_burst(signals(1, arrivals=arrivals(4.0, burst=40.0), fleet=fleet), counted(clusters)), (
        "more than clusters explain"
    )
    lone, together = (expected_load(burst, each) for each in (counted([4.0] * 30), counted(clusters)))
    assert lone.arrivals_per_s == 10.0
    assert together.arrivals_per_s == pytest.approx(3.8, rel=0.01)


@settings(max_examples=num_examples(60))
@given(rates, st.integers(1, 10), st.floats(1, 4000), st.floats(1.0, 100.0))
def test_clustered_prompts_wait_longer_and_more_replicas_shorten_the_wait(
    rate: float, replicas: int, prompt: float, together: float
) -> None:
    predictor, lone = Predictor(SHAPE, 0.95), OfferedLoad(rate, prompt, prompt, prompt * 1.5, 50)
    uneven = msgspec.structs.replace(lone, dispersion=together)
    found, apart = predictor.predict(uneven, replicas), predictor.predict(lone, replicas)
    assert found.ttft_ms >= apart.ttft_ms
    assert found.tpot_ms == apart.tpot_ms
    assert predictor.predict(uneven, replicas + 1).ttft_ms <= found.ttft_ms * 1.0001


@settings(max_examples=num_examples(60))
@given(rates, st.integers(1, 10), st.floats(1, 4000), st.floats(0.0, 1.0))
def test_prompts_of_equal_length_wait_no_longer(rate: float, replicas: int, prompt: float, variation: float) -> None:
    predictor, uneven = Predictor(SHAPE, 0.95), OfferedLoad(rate, prompt, prompt, prompt * 1.5, 50)
    even = msgspec.structs.replace(uneven, computed_variation=variation)
    assert predictor.predict(even, replicas).ttft_ms <= predictor.predict(uneven, replicas).ttft_ms


def test_replicas_for_the_queue_are_worth_what_they_cost() -> None:
    """One replica serves the arrivals, and a long queue will wait when another one could be ready."""

    def ordered(waiting: int, cold_start_s: float) -> int:
        fleet = Fleet(wanted=2, ready=2, cold_start_s=cold_start_s)
        queue = QueueLoad(num_requests=waiting, num_tokens=waiting * 500)
        now = signals(2, arrivals=arrivals(2.0), fleet=fleet, queue=queue)
        remembered = counted([2.0] * 50)
        assert SLO.slo is not None
        return slo_target(SLO, SLO.slo, now, remembered, expected_load(now, remembered)).goal.needed

    assert ordered(0, 60.0) == ordered(20, 60.0), "a queue that is served by then adds nothing"
    numbers = [ordered(waiting, 60.0) for waiting in (3000, 6000, 20_000)]
    assert numbers == sorted(numbers)
    assert ordered(0, 60.0) < numbers[0] < numbers[-1]
    assert ordered(6000, 600.0) <= ordered(6000, 60.0), "a replica that starts slowly is worth less"
