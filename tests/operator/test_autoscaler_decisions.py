"""The autoscaler's decisions, in a table and in short sequences."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from scaling_world import BLOCK_SIZE, BLOCKS, Scaled, arrivals, busy, engines, signals

from pagemill_crds.sections.autoscaling import AutoscalingSection
from pagemill_operator.autoscaler.behavior import LONGEST_GAP_S
from pagemill_operator.autoscaler.demand import PANIC_S, DemandPolicy
from pagemill_operator.autoscaler.memory import MAX_FLAPS, Memory
from pagemill_operator.autoscaler.settings import Direction, Rule, ScalingSettings, Slo, settings_of
from pagemill_operator.autoscaler.signals import STARTS_S, Fleet
from pagemill_protocol.report.load import Arrivals, EnginesLoad, Lengths, QueueLoad

KV = ScalingSettings("Active", 1, 10, kv_cache_usage=0.8, queue_depth=4)
WINDOW = msgspec.structs.replace(KV, down=Direction(300.0, is_own_window=True))
"""Settings with an explicit window, so that no idle replica is removed earlier."""


def policy(**changes: Any) -> ScalingSettings:
    return msgspec.structs.replace(KV, **changes)


@pytest.mark.parametrize(
    ("replicas", "load", "expected", "reason"),
    [
        (2, {"active": 1.5}, 2, "Steady"),
        (2, {"active": 1.7}, 3, "ScaledUp"),
        (1, {"active": 1.0, "queue": QueueLoad(num_requests=3, num_tokens=3 * BLOCKS * BLOCK_SIZE)}, 5, "ScaledUp"),
        (1, {"active": 0.1, "queue": QueueLoad(num_requests=30, num_tokens=100)}, 8, "ScaledUp"),
        (1, {"active": 0.1, "waiting": 9}, 3, "ScaledUp"),
        (3, {"active": 0.1, "queue": QueueLoad(num_requests=400, num_tokens=10**7)}, 10, "ScaledUp"),
        (10, {"active": 10.0, "waiting": 500}, 10, "AtMaximum"),
        (3, {"active": 0.2}, 3, "Stabilizing"),
    ],
    ids=str,
)
def test_a_load_and_its_replicas(replicas: int, load: dict[str, Any], expected: int, reason: str) -> None:
    decision = Scaled(KV, replicas=replicas, lengths=Lengths()).decide(**load)
    assert (decision.replicas, decision.reason) == (expected, reason)


def test_a_queue_that_ends_before_a_replica_could_serve_adds_none() -> None:
    """About ten requests per second are served: 40 take seconds, 1,000 take longer than a start."""
    scaled = Scaled(policy(kv_cache_usage=None, queue_depth=2), replicas=1)
    short = scaled.decide(rate=1.0, waiting=40)
    assert (short.replicas, short.reason) == (1, "Steady")
    scaled.now += 10
    assert scaled.decide(rate=1.0).replicas == 1
    long = scaled.decide(rate=1.0, queue=QueueLoad(num_requests=1000, num_tokens=500_000))
    assert 1 < long.replicas <= 6, "replicas for the arrivals and the queue within another start"
    queue = next(goal for goal in long.goals if goal.name == "queueDepth")
    assert "will when a replica ordered now could serve, in 30 s" in queue.reason


def test_a_queue_that_outlasts_its_forecast_adds_replicas() -> None:
    scaled = Scaled(policy(kv_cache_usage=None, queue_depth=2), replicas=1, cold_start_s=30.0)
    scaled.run(29.0, lambda at, ready: {"rate": 1.0, "waiting": 40})
    assert scaled.wanted == 1
    scaled.run(4.0, lambda at, ready: {"rate": 1.0, "waiting": 40})
    assert scaled.wanted == 10


def test_blocks_of_requests_that_will_not_wait_add_no_replicas() -> None:
    queue = QueueLoad(num_requests=40, num_tokens=20_000)
    assert Scaled(KV, replicas=1).decide(rate=1.0, active=0.5, queue=queue).replicas == 1
    assert Scaled(KV, replicas=1, lengths=Lengths()).decide(rate=1.0, active=0.5, queue=queue).replicas > 1


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"num_reporting": 0, "engines": EnginesLoad(), "arrivals": Arrivals()}, "0 of 1 gateways"),
        ({"num_gateways": 2}, "1 of 2 gateways"),
        ({"num_gateways": 0}, "1 of 0 gateways"),
        ({"engines": engines(2, truth="stale")}, "reports are stale"),
        ({"engines": EnginesLoad()}, "reports are unknown"),
        ({"arrivals": Arrivals()}, "arrivals are unknown"),
    ],
    ids=str,
)
def test_missing_signals_remove_nothing_and_are_reported(fields: dict[str, Any], word: str) -> None:
    scaled = Scaled(policy(min_replicas=0), replicas=3)
    for _ in range(500):
        decision = scaled.decide(**fields)
        scaled.now += 10
    assert (decision.replicas, decision.reason) == (3, "SignalsMissing")
    assert word in decision.message


def test_known_signals_add_replicas_while_others_are_missing() -> None:
    queue = QueueLoad(num_requests=20, num_tokens=10)
    decision = Scaled(KV, replicas=2, lengths=Lengths()).decide(num_gateways=2, queue=queue)
    assert (decision.replicas, decision.reason) == (5, "ScaledUp")
    assert decision.missing


def test_a_demand_with_missing_signals_counts_in_no_window() -> None:
    scaled = Scaled(WINDOW, replicas=6)
    scaled.run(400, lambda at, ready: {"active": 4.5, "rate": 1.0})
    scaled.run(400, lambda at, ready: {"num_reporting": 0, "engines": EnginesLoad(), "arrivals": Arrivals()})
    scaled.run(290, lambda at, ready: {"active": 0.4, "rate": 1.0})
    assert scaled.wanted == 6, "a window without signals must not count as low demand"
    scaled.run(20, lambda at, ready: {"active": 0.4, "rate": 1.0})
    assert scaled.wanted == 1


def test_after_the_window_a_lower_load_removes_the_replicas_that_the_window_allows() -> None:
    scaled = Scaled(WINDOW, replicas=6)
    scaled.run(100, lambda at, ready: {"active": 3.5, "rate": 1.0})
    scaled.run(290, lambda at, ready: {"active": 0.4, "rate": 1.0})
    assert scaled.changes == [(6, 5)], "one window after the start, by the highest demand within it"
    scaled.run(100, lambda at, ready: {"active": 0.4, "rate": 1.0})
    assert scaled.wanted == 1


def test_one_replica_less_must_meet_the_target_with_some_additional_load() -> None:
    scaled = Scaled(KV, replicas=2)
    scaled.run(2000, lambda at, ready: {"active": 0.75, "rate": 1.0})
    assert scaled.wanted == 2
    scaled.run(2000, lambda at, ready: {"active": 0.7, "rate": 1.0})
    assert scaled.wanted == 1


def test_used_sequence_slots_keep_replicas_that_the_queue_alone_would_not() -> None:
    scaled = Scaled(policy(kv_cache_usage=None, queue_depth=2), replicas=3)
    scaled.run(2000, lambda at, ready: {"active": 0.1, "running": 150, "rate": 1.0})
    assert scaled.wanted == 3


def test_starting_pods_count_as_capacity() -> None:
    scaled = Scaled(KV, replicas=1, cold_start_s=120, lengths=Lengths())
    queue = QueueLoad(num_requests=12, num_tokens=2 * BLOCKS * BLOCK_SIZE)
    scaled.run(110, lambda at, ready: {"active": 1.0, "queue": queue})
    assert scaled.changes == [(1, 4)], "the same queue must not add replicas twice"


def test_nothing_is_removed_while_a_replica_starts_up_to_a_time_limit() -> None:
    scaled = Scaled(KV, replicas=1, cold_start_s=10**6, lengths=Lengths())
    scaled.decide(active=1.0, waiting=10)
    assert scaled.wanted == 3
    scaled.cold_start_s = 5.0
    decision = scaled.decide(fleet=Fleet(wanted=3, ready=1, pending=2, starting_s=400.0))
    assert decision.reason == "ReplicasStarting"
    fleet = Fleet(wanted=3, ready=1, pending=2, starting_s=STARTS_S + 1)
    scaled.run(400, lambda at, ready: {"fleet": fleet, "engines": engines(1)})
    assert scaled.decisions[-1].replicas < 3


def test_replicas_without_a_node_leave_the_fleet_saturated() -> None:
    scaled = Scaled(policy(max_replicas=10), replicas=1)
    scaled.wanted = 3
    for at_s, reason in ((0.0, "Steady"), (9.0, "Steady"), (10.0, "Saturated")):
        scaled.now = 1000.0 + at_s
        stuck = Fleet(wanted=2, ready=1, pending=1, starting_s=at_s)
        queue = QueueLoad(num_requests=9, num_tokens=BLOCKS * BLOCK_SIZE)
        decision = scaled.decide(fleet=stuck, engines=engines(1, active=1.0), queue=queue)
        assert decision.reason == reason, decision
    assert "no node has room for 1 replica" in decision.message


def test_after_a_burst_nothing_is_removed_for_a_minute() -> None:
    scaled = Scaled(policy(down=Direction(0.0)), replicas=5)
    scaled.decide(active=3.9, rate=1.0)
    assert scaled.decide(active=0.5, rate=1.0, burst=20.0).reason == "Panic"
    scaled.now += PANIC_S - 1
    assert scaled.decide(active=0.5, rate=1.0).reason == "Panic"
    scaled.now += 2
    assert scaled.decide(active=0.5, rate=1.0).reason == "ScaledDown"


def test_the_last_replica_is_removed_by_its_own_window_also_after_a_burst() -> None:
    scaled = Scaled(policy(min_replicas=0, idle_s=20.0), replicas=1)
    assert scaled.decide(active=0.5, rate=1.0, burst=20.0).panic
    scaled.now += 19
    assert scaled.decide(arrivals=arrivals(0.3, idle_s=19.0)).replicas == 1
    scaled.now += 2
    decision = scaled.decide(arrivals=arrivals(0.3, idle_s=21.0))
    assert (decision.replicas, decision.reason, decision.panic) == (0, "ScaledToZero", True)


def test_a_long_idle_deployment_scales_to_zero_and_back_at_once() -> None:
    scaled = Scaled(policy(min_replicas=0, idle_s=120.0), replicas=1)
    assert scaled.decide(arrivals=arrivals(0.0, idle_s=119.0)).replicas == 1
    assert scaled.decide(arrivals=arrivals(0.0, idle_s=121.0), running=1).replicas == 1
    decision = scaled.decide(arrivals=arrivals(0.0, idle_s=121.0))
    assert (decision.replicas, decision.reason) == (0, "ScaledToZero")
    none = EnginesLoad(truth="value")
    assert scaled.decide(arrivals=arrivals(0.0, idle_s=200.0), engines=none).reason == "Steady"
    queue = QueueLoad(num_requests=1, num_bytes=100, num_tokens=33, needs_engine=True)
    decision = scaled.decide(arrivals=arrivals(0.0, idle_s=300.0), engines=none, queue=queue)
    assert (decision.replicas, decision.reason) == (1, "Woken")


@pytest.mark.parametrize(("cold_start_s", "idle_s"), [(10.0, 20.0), (70.0, 70.0), (400.0, 300.0)])
def test_without_a_configured_time_the_last_replica_is_removed_after_a_start_time(
    cold_start_s: float, idle_s: float
) -> None:
    scaled = Scaled(policy(min_replicas=0, learns_idle_s=True), replicas=1, cold_start_s=cold_start_s)
    assert scaled.decide(arrivals=arrivals(0.0, idle_s=idle_s - 1)).replicas == 1
    assert scaled.decide(arrivals=arrivals(0.0, idle_s=idle_s + 1)).reason == "ScaledToZero"


def test_requests_soon_after_scaling_to_zero_keep_the_last_replica_for_longer() -> None:
    scaled = Scaled(policy(min_replicas=0, learns_idle_s=True), replicas=1, cold_start_s=10.0)
    none = EnginesLoad(truth="value")
    stayed = []
    for pause_s in (15.0, 15.0, 15.0, 15.0, 15.0, 400.0, 400.0):
        idle_s = next(s for s in range(0, 1000, 5) if scaled.decide(arrivals=arrivals(0.0, idle_s=s)).replicas == 0)
        stayed.append(idle_s)
        scaled.run(pause_s, lambda at, ready: {"engines": none})
        queue = QueueLoad(num_requests=1, num_tokens=33, needs_engine=True)
        assert scaled.decide(engines=none, queue=queue).reason == "Woken"
        scaled.run(20.0, lambda at, ready: {"active": 0.1, "running": 1, "rate": 0.1})
    assert stayed == [20, 40, 80, 160, 160, 160, 80]


def test_without_an_observed_start_the_last_replica_is_removed_after_a_minute() -> None:
    scaled, fleet = Scaled(policy(min_replicas=0, learns_idle_s=True), replicas=1), Fleet(wanted=1, ready=1)
    assert scaled.decide(fleet=fleet, arrivals=arrivals(0.0, idle_s=59.0)).replicas == 1
    assert scaled.decide(fleet=fleet, arrivals=arrivals(0.0, idle_s=61.0)).reason == "ScaledToZero"


def test_requests_of_past_minutes_start_no_replica() -> None:
    scaled = Scaled(policy(min_replicas=0, slo=Slo(ttft_ms=2000.0)), replicas=1)
    scaled.run(200.0, lambda at, ready: {"active": 0.1, "running": 1, "rate": 0.05})
    scaled._order(0)
    scaled.run(60.0, lambda at, ready: {"rate": 0.0, "engines": EnginesLoad(truth="value")})
    assert scaled.wanted == 0


def test_a_request_after_a_pause_longer_than_worth_keeping_changes_nothing() -> None:
    scaled = Scaled(policy(min_replicas=0, learns_idle_s=True), replicas=1, cold_start_s=60.0)
    none, queue = EnginesLoad(truth="value"), QueueLoad(num_requests=1, num_tokens=33, needs_engine=True)
    for pause_s, quick_returns in ((200.0, 0), (50.0, 1)):
        assert scaled.decide(arrivals=arrivals(0.0, idle_s=240.0)).reason == "ScaledToZero"
        scaled.run(pause_s, lambda at, ready: {"engines": none})
        assert scaled.decide(engines=none, queue=queue).reason == "Woken"
        assert scaled.memory.quick_returns == quick_returns
        scaled.run(200.0, lambda at, ready: {"active": 0.1, "running": 1, "rate": 0.1})


def test_the_wait_for_the_first_replica_is_not_a_sign_of_too_few_replicas() -> None:
    scaled = Scaled(policy(min_replicas=0, kv_cache_usage=None, queue_depth=2), replicas=1, cold_start_s=30.0)
    scaled.decide(active=0.5)
    scaled._order(0)
    queue = QueueLoad(num_requests=9, num_tokens=900, needs_engine=True)
    scaled.run(30.0, lambda at, ready: {"rate": 0.3, "queue": queue})
    assert scaled.memory.waiting_since_s is None
    scaled.run(20.0, lambda at, ready: {"rate": 0.3, "queue": queue})
    assert scaled.changes == [(0, 1)]


def test_several_replicas_start_at_once_if_many_requests_wait() -> None:
    scaled = Scaled(policy(min_replicas=0), replicas=1, lengths=Lengths())
    scaled.decide(active=0.5)
    scaled._order(0)
    queue = QueueLoad(num_requests=30, num_tokens=3 * BLOCKS * BLOCK_SIZE, needs_engine=True)
    assert scaled.decide(engines=EnginesLoad(truth="value"), queue=queue).replicas == 8


def test_a_starting_replica_is_not_stopped_because_its_client_left() -> None:
    scaled = Scaled(policy(min_replicas=0, idle_s=1.0), replicas=0, cold_start_s=60)
    none = EnginesLoad(truth="value")
    assert scaled.decide(engines=none, queue=QueueLoad(num_requests=1, needs_engine=True)).replicas == 1
    scaled.now += 10
    decision = scaled.decide(engines=none, arrivals=arrivals(0.0, idle_s=500.0))
    assert (decision.replicas, decision.reason) == (1, "ReplicasStarting")


def test_idle_replicas_are_removed_by_the_window_and_the_last_by_its_own() -> None:
    scaled = Scaled(policy(min_replicas=0, idle_s=30.0, down=WINDOW.down), replicas=4)
    scaled.run(280, lambda at, ready: {"arrivals": arrivals(0.0, idle_s=1000 + at)})
    assert scaled.wanted == 4
    scaled.run(60, lambda at, ready: {"arrivals": arrivals(0.0, idle_s=2000 + at)})
    assert scaled.changes == [(4, 1), (1, 0)]


def test_standby_replicas_are_not_part_of_the_decided_number() -> None:
    scaled = Scaled(policy(warm=2, min_replicas=0), replicas=2)
    scaled.run(1000, lambda at, ready: {"arrivals": arrivals(0.0, idle_s=10_000)})
    assert scaled.wanted == 0
    assert scaled.decide(queue=QueueLoad(num_requests=1, num_tokens=10, needs_engine=True)).replicas == 1


@pytest.mark.parametrize(
    ("up", "expected"),
    [
        (Direction(), 9),
        (Direction(rules=(Rule("Pods", 2, 60.0),)), 4),
        (Direction(rules=(Rule("Percent", 100, 60.0),)), 4),
        (Direction(rules=(Rule("Pods", 4, 60.0), Rule("Percent", 50, 60.0))), 6),
        (Direction(select="Min", rules=(Rule("Pods", 4, 60.0), Rule("Percent", 50, 60.0))), 3),
        (Direction(select="Disabled"), 2),
        (Direction(30.0), 2),
    ],
    ids=str,
)
def test_growth_is_limited_by_the_behavior(up: Direction, expected: int) -> None:
    scaled = Scaled(policy(up=up), replicas=2, lengths=Lengths())
    load = {"active": 2.0, "queue": QueueLoad(num_requests=36, num_tokens=10)}
    assert scaled.decide(**dict(load)).replicas == expected
    if up.rules:
        scaled.now += 30
        assert scaled.decide(**dict(load)).reason == "RateLimited", "the period includes what was added within it"
        scaled.now += 31
        assert scaled.decide(**dict(load)).replicas > expected


def test_growth_within_a_window_follows_the_lowest_demand() -> None:
    scaled = Scaled(policy(up=Direction(60.0, is_own_window=True)), replicas=1, lengths=Lengths())
    for waiting in (12, 8, 20):
        assert scaled.decide(waiting=waiting).reason == "Stabilizing"
        scaled.now += 20
    assert scaled.decide(waiting=20).replicas == 2


@pytest.mark.parametrize(
    ("down", "expected"),
    [
        (Direction(0.0, is_own_window=True), 1),
        (Direction(0.0, rules=(Rule("Pods", 3, 60.0),)), 5),
        (Direction(0.0, rules=(Rule("Percent", 50, 60.0),)), 4),
        (Direction(0.0, select="Min", rules=(Rule("Pods", 3, 60.0), Rule("Percent", 50, 60.0))), 5),
        (Direction(0.0, select="Disabled"), 8),
    ],
    ids=str,
)
def test_shrinking_is_limited_by_the_behavior(down: Direction, expected: int) -> None:
    scaled = Scaled(policy(down=down), replicas=8)
    assert scaled.decide(active=0.1, rate=1.0).replicas == expected


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, LONGEST_GAP_S + 1])
def test_a_clock_that_jumps_removes_nothing_for_a_window(jump_s: float) -> None:
    scaled = Scaled(WINDOW, replicas=4)
    scaled.run(200, lambda at, ready: {"active": 0.2, "rate": 1.0})
    scaled.now += jump_s
    scaled.run(290, lambda at, ready: {"active": 0.2, "rate": 1.0})
    assert scaled.changes == []
    scaled.run(20, lambda at, ready: {"active": 0.2, "rate": 1.0})
    assert scaled.changes == [(4, 1)]


def test_an_operator_that_just_started_removes_nothing_for_a_window() -> None:
    decision, memory = DemandPolicy().decide(KV, signals(3), Memory())
    assert (decision.replicas, decision.reason) == (3, "Stabilizing")
    assert memory.history.since_s == 1000.0


def test_changed_bounds_apply_at_once() -> None:
    assert Scaled(policy(max_replicas=3), replicas=6).decide(active=5.0).replicas == 3
    assert Scaled(policy(min_replicas=4), replicas=1).decide(active=0.1).replicas == 4


@pytest.mark.slow
def test_after_a_removal_that_was_needed_again_the_next_one_waits_longer() -> None:
    scaled = Scaled(KV, replicas=1, cold_start_s=50.0)
    for _ in range(12):
        scaled.run(100, lambda at, ready: busy(2.0, ready))
        scaled.run(400, lambda at, ready: busy(0.5, ready))
    ups = [change for change in scaled.changes if change[0] == 1 < change[1]]
    assert len(ups) <= 4
    own = Scaled(policy(down=Direction(300.0, is_own_window=True)), replicas=1, cold_start_s=50.0)
    for _ in range(12):
        own.run(100, lambda at, ready: busy(2.0, ready))
        own.run(400, lambda at, ready: busy(0.5, ready))
    assert len([change for change in own.changes if change[1] > change[0]]) >= 11, "an explicit window must be kept"


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "most_removals"), [(WINDOW, 0), (KV, MAX_FLAPS + 2)])
def test_a_sine_load_is_followed_without_flapping(settings: ScalingSettings, most_removals: int) -> None:
    # In two hours a flap is forgotten twice.
    scaled = Scaled(settings, replicas=2, cold_start_s=50.0)
    scaled.run(7200, lambda at, ready: busy(2.0 + math.sin(at * 2 * math.pi / 240), ready))
    assert len([change for change in scaled.changes if change[1] < change[0]]) <= most_removals
    assert 4 <= scaled.wanted <= 5


@pytest.mark.parametrize(("cold_start_s", "idle_s"), [(10.0, 20.0), (50.0, 50.0), (400.0, 300.0)])
def test_replicas_that_are_idle_even_at_half_as_much_more_load_are_removed_after_a_start_time(
    cold_start_s: float, idle_s: float
) -> None:
    scaled = Scaled(KV, replicas=6, cold_start_s=cold_start_s)
    scaled.run(400, lambda at, ready: {"active": 4.5, "rate": 1.0})
    scaled.run(idle_s - 10, lambda at, ready: {"active": 0.4, "rate": 1.0})
    assert scaled.wanted == 6
    scaled.run(20, lambda at, ready: {"active": 0.4, "rate": 1.0})
    assert scaled.wanted == 1


@pytest.mark.parametrize(("cold_start_s", "window_s"), [(5.0, 30.0), (30.0, 90.0), (60.0, 180.0), (600.0, 300.0)])
def test_a_replica_that_half_as_much_more_load_would_use_is_removed_after_three_start_times(
    cold_start_s: float, window_s: float
) -> None:
    scaled = Scaled(KV, replicas=2, cold_start_s=cold_start_s)
    scaled.run(400, lambda at, ready: {"active": 1.5, "rate": 1.0})
    scaled.run(window_s - 20, lambda at, ready: {"active": 0.6, "rate": 1.0})
    assert scaled.wanted == 2
    scaled.run(40, lambda at, ready: {"active": 0.6, "rate": 1.0})
    assert scaled.wanted == 1


def test_the_defaults_of_the_resource() -> None:
    found = settings_of(AutoscalingSection.model_validate({"maxReplicas": 4}))
    assert found == ScalingSettings("Active", 1, 4, kv_cache_usage=0.8, queue_depth=2, learns_idle_s=True)
    section = {
        "mode": "Advisory",
        "minReplicas": 0,
        "maxReplicas": 4,
        "slo": {"ttft": "500ms", "tpot": "50ms", "percentile": 90},
        "scaleToZeroAfter": "10m",
        "behavior": {
            "scaleUp": {"policies": [{"type": "Pods", "value": 2, "periodSeconds": 60}]},
            "scaleDown": {"stabilizationWindowSeconds": 0, "selectPolicy": "Disabled"},
        },
    }
    found = settings_of(AutoscalingSection.model_validate(section))
    assert found is not None
    assert found.slo is not None
    assert (found.slo.ttft_ms, found.slo.tpot_ms, found.slo.share, found.idle_s) == (500.0, 50.0, 0.9, 600.0)
    assert (found.kv_cache_usage, found.queue_depth) == (None, None)
    assert found.up == Direction(rules=(Rule("Pods", 2, 60.0),))
    assert found.down == Direction(0.0, "Disabled", is_own_window=True)
    assert settings_of(None) is None
    assert settings_of(AutoscalingSection.model_validate({"maxReplicas": 4, "mode": "External"})) is None
