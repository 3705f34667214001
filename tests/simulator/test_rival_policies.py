"""Policies of other platforms reproduce examples of their documentation and always keep their bounds.

If a document has a formula with numbers, the test computes them; if it only describes a behaviour, the test checks that
behaviour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from engine_reports import used
from hypothesis import given
from hypothesis import strategies as st

from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Fleet, Signals
from pagemill_operator.autoscaler.target_tracking import external_metric, pods_metric
from pagemill_protocol.report.histogram import histogram_of
from pagemill_protocol.report.load import EnginesLoad, Lengths
from pagemill_protocol.report.state import EngineLoad, StepTimeParams
from pagemill_simulator.parameters import ParameterError
from pagemill_simulator.scaling.dynamo import Dynamo, DynamoLoad
from pagemill_simulator.scaling.fixed import Fixed, FixedReplicas
from pagemill_simulator.scaling.hpa import Hpa, HpaOnQueue, KedaEpp, KedaOnEpp
from pagemill_simulator.scaling.hpa_behavior import BehaviorMemory, HpaBehavior, HpaDirection, HpaRule
from pagemill_simulator.scaling.knative import Knative, KnativeKpa
from pagemill_simulator.scaling.kubeai import KubeAi, KubeAiMean
from pagemill_simulator.scaling.policy import FleetScaler, FleetSnapshot, PodSnapshot, ReplicaBounds
from pagemill_simulator.scaling.rival import Rival
from pagemill_simulator.scaling.rivals import RIVALS, make_rival
from pagemill_simulator.scaling.simulated import rival, scraped
from pagemill_simulator.scaling.wva import Wva, WvaHpa, WvaLoad, WvaSaturation, WvaThroughHpa, step

BOUNDS = ReplicaBounds(1, 100)
ANY = ReplicaBounds(0, 100)
DEFAULT_UP = HpaDirection(0.0, (HpaRule("percent", 100.0, 15.0), HpaRule("pods", 4.0, 15.0)))


def load_of(num_running: int = 0, num_waiting: int = 0, kv_usage: float = 0.0) -> EngineLoad:
    """Return a load; a usage that no engine can have stands for an engine that does not report its KV cache."""
    if 0 <= kv_usage < math.inf:
        return used(kv_usage, num_running, num_waiting)
    return EngineLoad(num_requests_running=num_running, num_requests_waiting=num_waiting)


def pods(ready: int, starting: int = 0, **load: Any) -> list[PodSnapshot]:
    return [PodSnapshot(f"pod-{number}", number < ready, load_of(**load)) for number in range(ready + starting)]


def seen(at_s: float, fleet: Sequence[PodSnapshot], *, num_held: int = 0, **reported: Any) -> FleetSnapshot:
    reported = {"wanted": len(fleet), "num_arrived": 100, "num_prompt_tokens_arrived": 100_000, **reported}
    return FleetSnapshot(
        at_s=at_s,
        pods=tuple(fleet),
        num_held=num_held,
        num_output_tokens_made=0,
        signals=reported.pop("signals", Signals(at_s=at_s, fleet=Fleet(wanted=reported["wanted"]))),
        **reported,
    )


def running(policy: FleetScaler, until_s: float, fleet: Sequence[PodSnapshot], *, from_s: float = 0.0) -> list[int]:
    """Return the policy's answer at each of its decisions, with replicas that are ready at once."""
    replicas, answers, at_s = len(fleet), [], from_s
    load = fleet[0].load
    total = load.num_requests_running * len(fleet)
    while at_s <= until_s:
        each = pods(replicas, num_running=total // max(1, replicas))
        rest = total - sum(pod.load.num_requests_running for pod in each)
        replicas = policy.decide(seen(at_s, each, num_held=rest))
        answers.append(replicas)
        at_s += policy.interval_s
    return answers


# KubeAI: docs/how-to/configure-autoscaling.md (interval 15 s, window 10 min, 250 requests to a replica, delay 45 s).

KUBEAI_EXAMPLE = KubeAi(interval_s=15, window_s=600, target_requests=250, scale_down_delay_s=45)


def test_kubeai_reaches_a_new_load_after_the_window_of_its_mean() -> None:
    """1,000 active requests need four replicas of 250; the mean of 40 samples approaches that sample by sample."""
    policy = rival(KubeAiMean(KUBEAI_EXAMPLE), ReplicaBounds(1, 9))
    answers = running(policy, 15.0 * 39, pods(1, num_running=1000))
    assert len(answers) == 40
    assert [answers.index(replicas) for replicas in (1, 2, 3, 4)] == [0, 10, 20, 30]
    assert answers[-1] == 4


def test_kubeai_removes_replicas_after_the_delay_of_lower_decisions() -> None:
    """45 s are three intervals of 15 s: the fourth decision removes replicas."""
    policy = rival(KubeAiMean(KUBEAI_EXAMPLE), ReplicaBounds(1, 9))
    answers = [policy.decide(seen(15.0 * tick, pods(4))) for tick in range(5)]
    assert answers == [4, 4, 4, 1, 1]


def test_kubeai_stays_within_the_bounds_of_its_example() -> None:
    policy = rival(KubeAiMean(KUBEAI_EXAMPLE), ReplicaBounds(1, 9))
    assert running(policy, 600, pods(1, num_running=100_000))[-1] == 9


def test_kubeai_starts_the_first_replica_for_a_request() -> None:
    policy = rival(KubeAiMean(), ANY)
    assert policy.wakes_at_once
    assert policy.decide(seen(0, [])) == 0
    assert policy.decide(seen(3.7, [], num_held=1)) == 1


# Kubernetes: "Horizontal Pod Autoscaling", algorithm details, scaling policies; enhancement 853, user stories.


def on_pods(values: Sequence[float], num_silent: int, target: float, current: int) -> int:
    return pods_metric(math.fsum(values), len(values), num_silent, target, current, tolerance=0.1)


def test_hpa_doubles_at_twice_the_target_and_halves_at_half() -> None:
    assert on_pods([0.2] * 4, 0, 0.1, 4) == 8
    assert on_pods([0.05] * 4, 0, 0.1, 4) == 2
    assert external_metric(0.8, 0.1, current=4, tolerance=0.1) == 8
    assert external_metric(0.2, 0.1, current=4, tolerance=0.1) == 2


def test_hpa_does_nothing_within_a_tenth_of_the_target() -> None:
    assert on_pods([5.4, 5.5], 0, 5, 2) == 2
    assert on_pods([4.6, 4.6], 0, 5, 2) == 2
    assert on_pods([5.6, 5.6], 0, 5, 2) == 3
    assert external_metric(10.9, 5, current=2, tolerance=0.1) == 2


def test_hpa_counts_pods_without_a_metric_as_idle_for_growth_and_on_target_for_removal() -> None:
    assert on_pods([20.0], 3, 5, 4) == 4, "20 waiting requests are the target of four replicas"
    assert on_pods([40.0], 3, 5, 4) == 8
    assert on_pods([7.0], 3, 5, 4) == 4, "counting them as idle would reverse the direction"
    assert on_pods([0.0, 0.0], 2, 5, 4) == 2
    assert on_pods([], 4, 5, 4) == 4, "without a metric the number must stay"


def course(behavior: HpaBehavior, current: int, desired: Sequence[int], every_s: float) -> list[int]:
    answers, memory = [], BehaviorMemory()
    for tick, recommended in enumerate(desired):
        current, memory = behavior.limit(memory, tick * every_s, current, recommended, ReplicaBounds(1, 5000))
        answers.append(current)
    return answers


def test_hpa_removes_ten_percent_or_four_pods_a_minute_whichever_is_more() -> None:
    """80 replicas on the way to 10: 8 in the first step, 8 of 72 in the next, 4 at a time below 40."""
    down = HpaDirection(0.0, (HpaRule("pods", 4, 60), HpaRule("percent", 10, 60)))
    answers = course(HpaBehavior(down=down), 80, [10] * 20, 60)
    assert answers[:2] == [72, 64]
    below = [before for before in answers if before <= 40]
    assert below == list(range(below[0], 10, -4)) + [10] * below.count(10)


def test_hpa_story_1_nine_hundred_percent_a_minute() -> None:
    up = HpaDirection(0.0, (HpaRule("percent", 900, 60),))
    assert course(HpaBehavior(up=up), 1, [1000] * 3, 60) == [10, 100, 1000]


def test_hpa_story_3_one_pod_in_five_minutes() -> None:
    up = HpaDirection(0.0, (HpaRule("pods", 1, 300),))
    assert course(HpaBehavior(up=up), 1, [50] * 16, 60) == [2] * 5 + [3] * 5 + [4] * 5 + [5]


def test_hpa_story_5_the_largest_recommendation_of_the_window_counts() -> None:
    down = HpaDirection(600.0, (HpaRule("pods", 5, 60),))
    recommended = [10, 9, 8, 9, 9, 8, 9, 8, 9, 8, 7]
    assert course(HpaBehavior(down=down), 10, recommended, 60) == [10] * 10 + [9]


def test_hpa_adds_four_pods_or_as_many_as_there_are_every_fifteen_seconds() -> None:
    assert course(HpaBehavior(DEFAULT_UP), 1, [100] * 6, 15) == [5, 10, 20, 40, 80, 100]


def test_hpa_removes_nothing_for_five_minutes_and_then_all_excess_replicas() -> None:
    answers = course(HpaBehavior(), 8, [8] + [1] * 25, 15)
    assert answers[:20] == [8] * 20
    assert answers[20] == 1


def test_hpa_on_the_queue_counts_starting_replicas() -> None:
    policy = rival(HpaOnQueue(), BOUNDS)
    first = policy.decide(seen(0, pods(1), num_held=20))
    assert first == 4
    assert policy.decide(seen(15, pods(1, 3), num_held=20)) == 4
    assert policy.decide(seen(30, pods(1, 3), num_held=40)) == 8


def test_keda_with_llm_ds_metrics_waits_five_minutes_before_it_adds() -> None:
    """The guide's reason is that replicas take some 240 s, and no policy counts starting ones."""
    policy = rival(KedaOnEpp(), BOUNDS)
    answers = [policy.decide(seen(15.0 * tick, pods(2, num_running=40))) for tick in range(22)]
    assert answers[:20] == [2] * 20
    assert answers[20] == 5, "80 running requests need five replicas of 16"
    assert rival(KedaOnEpp(KedaEpp(up_window_s=0)), BOUNDS).decide(seen(0, pods(2, num_running=1), num_held=3)) == 3


# llm-d: docs/saturation-scaling-config.md (how scale-up triggers work) and docs/saturation-analyzer.md.


def test_wva_adds_a_replica_if_the_others_have_too_little_free_cache() -> None:
    """65 % and 72 % leave 0.115 of the cache on average, which is enough; a little more than 75 % is not."""
    assert step([WvaLoad(0.65, 0), WvaLoad(0.72, 0)], Wva()) == 0
    assert step([WvaLoad(0.65, 0), WvaLoad(0.751, 0)], Wva()) == 1


def test_wva_removes_a_replica_only_if_the_rest_can_take_its_load() -> None:
    assert step([WvaLoad(0.3, 0), WvaLoad(0.3, 0)], Wva()) == -1
    assert step([WvaLoad(0.375, 0), WvaLoad(0.375, 0)], Wva()) == 0, "0.05 free, as in the documented log line"
    assert step([WvaLoad(0.1, 2), WvaLoad(0.1, 2)], Wva()) == 0, "one free waiting slot is too few"
    assert step([WvaLoad(0.0, 0)], Wva()) == 0, "two are needed before one replica may be removed"


def test_wva_adds_a_replica_when_all_are_saturated() -> None:
    assert step([WvaLoad(0.85, 0), WvaLoad(0.1, 5)], Wva()) == 1
    assert step([WvaLoad(0.1, 5), WvaLoad(0.2, 1)], Wva()) == 0, "saturated replicas are not counted"


def test_wva_adds_one_replica_at_a_time_and_none_while_one_starts() -> None:
    """The example has two replicas that report: the target is three."""
    policy = rival(WvaSaturation(), BOUNDS)
    assert policy.decide(seen(0, pods(2, kv_usage=0.79))) == 3
    assert policy.decide(seen(30, pods(2, 1, kv_usage=0.79))) == 3
    assert policy.decide(seen(60, pods(3, kv_usage=0.79))) == 4


def test_wva_uses_the_peak_of_the_last_minute() -> None:
    """72 % at 15 s is too much until 75 s have passed; decisions come every 30 s, samples every 15 s."""
    policy = rival(WvaSaturation(), BOUNDS)
    usages = [0.3, 0.72, 0.3, 0.3, 0.3, 0.3, 0.3]
    answers = [policy.decide(seen(15.0 * n, pods(2, kv_usage=usage))) for n, usage in enumerate(usages)]
    assert answers == [1, 2, 3, 2, 3, 2, 1]


def test_wva_with_the_autoscaler_of_its_chart_waits_four_minutes_in_both_directions() -> None:
    policy = rival(WvaThroughHpa(), BOUNDS)
    up = [policy.decide(seen(15.0 * tick, pods(2, kv_usage=0.79))) for tick in range(18)]
    assert up[:16] == [2] * 16
    assert up[16] == 3, "a decision must be kept until it is applied"
    at_once = rival(WvaThroughHpa(WvaHpa(up_window_s=0, down_window_s=0)), BOUNDS)
    assert at_once.decide(seen(0, pods(2, kv_usage=0.79))) == 3
    policy = rival(WvaThroughHpa(), BOUNDS)
    down = [policy.decide(seen(15.0 * tick, pods(2, kv_usage=0.2))) for tick in range(18)]
    assert (down[:16], down[16]) == ([2] * 16, 1)


# Knative: samples/autoscale-go of its documentation, and the panic mode in the tests of Serving.


def test_knative_creates_five_pods_for_fifty_requests_with_a_target_of_ten() -> None:
    policy = rival(KnativeKpa(Knative(target_concurrency=10, target_utilization=1)), BOUNDS)
    answers = running(policy, 120, pods(1, num_running=50))
    assert set(answers) == {5}, "at once, by panic mode, and permanently"


def test_knative_uses_the_short_window_in_panic_mode_and_returns_after_a_stable_one() -> None:
    policy = rival(KnativeKpa(Knative(target_concurrency=10, target_utilization=1)), BOUNDS)
    assert set(running(policy, 118, pods(1, num_running=10))) == {1}
    surge = [policy.decide(seen(120 + 2.0 * tick, pods(1, num_running=40))) for tick in range(3)]
    assert surge == [2, 3, 4], "the means over six seconds are 20, 30 and 40, those of the minute 1.1 to 1.3"
    calm = [policy.decide(seen(126 + 2.0 * tick, pods(4, num_running=1))) for tick in range(40)]
    assert set(calm[:28]) == {4}, "in panic mode nothing is removed"
    assert calm[-1] == 2, "at least half"


def test_knative_keeps_the_last_replica_for_the_grace_period() -> None:
    policy = rival(KnativeKpa(), ANY)
    answers = [policy.decide(seen(2.0 * tick, pods(1))) for tick in range(17)]
    assert answers == [1] * 15 + [0] * 2
    assert policy.wakes_at_once
    assert policy.decide(seen(33.1, [], num_held=1)) == 1


# Dynamo: docs/design-docs/planner-design.md (scaling decisions) and pull request 9294 (what two workers do).

STEP_TIME = StepTimeParams(knots_tokens=[1, 2048], knot_ms=[5.0, 105.0], decode_context_ms=1e-4)


def engines_reported(count: int, **reported: Any) -> EnginesLoad:
    reported = {"step_time": STEP_TIME, "max_step_tokens": 2048, **reported}
    return EnginesLoad(truth="value", num_reporting=count, num_kv_bytes_total=16_000 * count, block_size=16, **reported)


def planner(
    fleet: Sequence[PodSnapshot], at_s: float = 0.0, *, engines: EnginesLoad | None = None, **reported: Any
) -> FleetSnapshot:
    ready = sum(pod.is_ready for pod in fleet)
    lengths = Lengths(truth="value", computed=histogram_of([1000.0] * 100))
    signals = Signals(
        at_s=at_s, fleet=Fleet(wanted=len(fleet)), engines=engines or engines_reported(ready), lengths=lengths
    )
    return seen(at_s, fleet, signals=signals, **reported)


def test_dynamo_adds_one_replica_if_the_estimates_of_all_engines_exceed_the_target() -> None:
    """30 prompts of 1,000 tokens wait in each: some 15 steps of 105 ms, three times the 500 ms of the guide."""
    policy = rival(DynamoLoad(), BOUNDS)
    assert policy.decide(planner(pods(2, num_running=20, num_waiting=30, kv_usage=0.3))) == 3
    one_is_free = [*pods(1, num_running=20, num_waiting=30, kv_usage=0.3), PodSnapshot("free", True, load_of())]
    assert rival(DynamoLoad(), BOUNDS).decide(planner(one_is_free)) == 2


def test_dynamo_adds_one_replica_for_the_time_between_tokens() -> None:
    slow = engines_reported(2, step_time=StepTimeParams(knots_tokens=[1, 2048], knot_ms=[60.0, 160.0]))
    assert rival(DynamoLoad(), BOUNDS).decide(planner(pods(2, num_running=20, kv_usage=0.2), engines=slow)) == 3


def test_dynamo_keeps_two_workers_whose_load_one_could_not_take() -> None:
    """Each has 70 % of its cache in use and 23 ms per token: below 80 % of the target, but 140 % of one cache."""
    policy = rival(DynamoLoad(Dynamo(itl_ms=40)), BOUNDS)
    assert policy.decide(planner(pods(2, num_running=60, kv_usage=0.7))) == 2
    assert rival(DynamoLoad(Dynamo(itl_ms=40)), BOUNDS).decide(planner(pods(2, num_running=10, kv_usage=0.1))) == 1


def test_dynamo_changes_nothing_while_a_replica_starts_or_an_engine_does_not_report() -> None:
    policy = rival(DynamoLoad(), BOUNDS)
    busy = {"num_running": 20, "num_waiting": 30, "kv_usage": 0.3}
    assert policy.decide(planner(pods(2, 1, **busy))) == 3
    assert policy.decide(planner(pods(2, num_running=0, kv_usage=math.nan), 5)) == 2
    assert policy.decide(planner(pods(2, **busy), 10, engines=EnginesLoad())) == 2
    assert policy.decide(planner(pods(2, **busy), 15, engines=engines_reported(2, step_time=StepTimeParams()))) == 2
    assert policy.decide(planner(pods(2, **busy), 20)) == 3


def test_fixed_never_changes() -> None:
    assert rival(FixedReplicas(Fixed(replicas=7)), BOUNDS).decide(seen(0, pods(2), num_held=500)) == 7
    assert rival(FixedReplicas(), BOUNDS).decide(seen(0, pods(2), num_held=500)) == 2


def test_rival_policies_are_created_by_name_and_parameters() -> None:
    assert list(RIVALS) == ["kubeai", "hpa", "keda-epp", "wva", "wva-hpa", "knative", "dynamo", "fixed"]
    assert rival(make_rival("hpa", {"target_waiting": "2"}), BOUNDS).decide(seen(0, pods(1), num_held=6)) == 3
    assert rival(make_rival("fixed", {"replicas": "7"}), BOUNDS).decide(seen(0, pods(1))) == 7
    with pytest.raises(ParameterError, match="no policy 'vpa'; there are kubeai, hpa"):
        make_rival("vpa")
    with pytest.raises(ParameterError, match="hpa: target_waiting: '0' will not do"):
        make_rival("hpa", {"target_waiting": "0"})
    assert Hpa().down_window_s == 300


# Properties for any input

numbers = st.integers(0, 10_000)
usages = st.one_of(st.floats(0, 1), st.sampled_from([math.nan, math.inf, -1.0]))
pods_seen = st.lists(st.tuples(st.booleans(), numbers, numbers, usages), max_size=4).map(
    lambda each: [PodSnapshot(f"pod-{n}", ready, load_of(*load)) for n, (ready, *load) in enumerate(each)]
)
step_times = st.sampled_from(
    [
        StepTimeParams(),
        STEP_TIME,
        StepTimeParams(knots_tokens=[1, 2048], knot_ms=[math.nan, math.inf]),
        StepTimeParams(knots_tokens=[5, 1], knot_ms=[1.0]),
    ]
)
moments = st.lists(
    st.tuples(st.floats(-4000, 4000), pods_seen, numbers, st.integers(0, 20), step_times), min_size=1, max_size=5
)
bounds_of_users = st.tuples(st.integers(0, 10), st.integers(0, 10)).map(
    lambda pair: ReplicaBounds(min(pair), max(pair))
)


@pytest.mark.parametrize("name", RIVALS)
@given(bounds=bounds_of_users, course=moments)
def test_no_policy_leaves_its_bounds_for_any_input(
    name: str, bounds: ReplicaBounds, course: list[tuple[float, list[PodSnapshot], int, int, StepTimeParams]]
) -> None:
    policy, at_s = rival(make_rival(name), bounds), 0.0
    for gap_s, fleet, num_held, wanted, step_time in course:
        at_s += gap_s
        engines = engines_reported(len(fleet), step_time=step_time) if fleet else EnginesLoad()
        answer = policy.decide(planner(fleet, at_s, engines=engines, num_held=num_held, wanted=wanted))
        assert bounds.min_replicas <= answer <= bounds.max_replicas


@pytest.mark.parametrize("name", RIVALS)
@given(count=st.integers(1, 6), usage=st.sampled_from([math.nan, math.inf]), num_running=st.integers(1, 50))
def test_missing_signals_never_scale_to_zero(name: str, count: int, usage: float, num_running: int) -> None:
    """Requests run, but caches, step times and the load stream report nothing."""
    policy = rival(make_rival(name), ANY)
    for tick in range(12):
        fleet = pods(count, num_running=num_running, kv_usage=usage)
        assert policy.decide(seen(tick * 15.0, fleet)) >= 1


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_policy_keeps_no_state_outside_its_memory(name: str) -> None:
    """Two deployments that alternate, with memories read from JSON, get the decisions that each would get alone."""
    policy, settings = make_rival(name), ScalingSettings("Active", *BOUNDS)
    loads = [pods(2, num_running=30, num_waiting=9, kv_usage=0.85), pods(3, num_running=1, kv_usage=0.1)]
    alone = [_course(policy, settings, [load]) for load in loads]
    assert [answers for each in alone for answers in each] == _course(policy, settings, loads)


def _course(policy: Rival[Any], settings: ScalingSettings, loads: Sequence[Sequence[PodSnapshot]]) -> list[list[int]]:
    memories = [policy.memory_type() for _ in loads]
    answers: list[list[int]] = [[] for _ in loads]
    for tick in range(40):
        for index, load in enumerate(loads):
            signals = scraped(planner(load, tick * policy.interval_s))
            memory = msgspec.json.decode(msgspec.json.encode(memories[index]), type=policy.memory_type)
            decision, memories[index] = policy.decide(settings, signals, memory)
            assert decision.message
            answers[index].append(decision.replicas)
    return answers
