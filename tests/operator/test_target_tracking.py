"""Target tracking: the ratio of HorizontalPodAutoscaler with the settings' targets, windows and limits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaling_world import Scaled, arrivals, engines

from pagemill_operator.autoscaler.settings import Direction, Rule, ScalingSettings, Slo
from pagemill_operator.autoscaler.signals import Fleet
from pagemill_protocol.report.load import Arrivals, EnginesLoad, QueueLoad


def settings(low: int = 1, high: int = 10, **fields: Any) -> ScalingSettings:
    return ScalingSettings("Active", low, high, policy="TargetTracking", **fields)


BOTH = settings(kv_cache_usage=0.8, queue_depth=4)


@pytest.mark.parametrize(
    ("replicas", "load", "expected", "reason"),
    [
        (2, {"active": 1.6}, 2, "Steady"),
        (2, {"active": 1.7}, 2, "Steady"),
        (2, {"active": 2.0}, 3, "ScaledUp"),
        (4, {"active": 4.0}, 5, "ScaledUp"),
        (1, {"active": 0.1, "waiting": 9}, 3, "ScaledUp"),
        (1, {"active": 0.1, "queue": QueueLoad(num_requests=30)}, 8, "ScaledUp"),
        (3, {"active": 2.4, "queue": QueueLoad(num_requests=400)}, 10, "ScaledUp"),
        (3, {"active": 0.5}, 3, "Stabilizing"),
        (12, {"active": 9.6}, 10, "OutOfBounds"),
        (10, {"active": 10.0}, 10, "AtMaximum"),
        (10, {"active": 8.0, "waiting": 100}, 10, "AtMaximum"),
    ],
    ids=str,
)
def test_replicas_follow_the_ratio_of_the_metric_to_the_target(
    replicas: int, load: dict[str, Any], expected: int, reason: str
) -> None:
    decision = Scaled(BOTH, replicas=replicas).decide(rate=1.0, **load)
    assert (decision.replicas, decision.reason) == (expected, reason)
    assert decision.message


def test_within_a_tenth_of_the_target_nothing_is_done() -> None:
    """With a target of 10 waiting requests and two replicas, this is from 18 to 22."""
    for waiting, expected in ((19, 2), (21, 2), (23, 3)):
        scaled = Scaled(settings(queue_depth=10), replicas=2)
        assert scaled.decide(rate=1.0, waiting=waiting, running=1).replicas == expected


def test_a_starting_replica_counts_as_idle_for_growth_and_as_on_target_for_removal() -> None:
    up = Scaled(settings(kv_cache_usage=0.5), replicas=2)
    fleet = Fleet(wanted=2, ready=1, loading=1)
    assert up.decide(rate=1.0, fleet=fleet, engines=engines(1, active=1.0)).replicas == 2
    down = Scaled(settings(kv_cache_usage=0.5, down=Direction(0.0)), replicas=3)
    fleet = Fleet(wanted=3, ready=2, loading=1)
    assert down.decide(rate=1.0, fleet=fleet, engines=engines(2, active=0.1, running=1)).replicas == 2


def test_replicas_are_removed_only_after_the_window() -> None:
    scaled = Scaled(BOTH, replicas=4)
    scaled.run(290, lambda at, ready: {"active": 0.4, "rate": 1.0, "running": 1})
    assert scaled.changes == []
    last = scaled.decisions[-1]
    assert last.message == "the load needs 1 replica; scaling down when that has held for 300 s"
    scaled.run(20, lambda at, ready: {"active": 0.4, "rate": 1.0, "running": 1})
    assert scaled.changes == [(4, 1)]


def test_behavior_limits_growth() -> None:
    scaled = Scaled(settings(queue_depth=1, up=Direction(rules=(Rule("Pods", 2, 60.0),))), replicas=1)
    load = {"rate": 1.0, "waiting": 9}
    assert scaled.decide(**dict(load)).replicas == 3
    scaled.now += 30
    decision = scaled.decide(**dict(load))
    assert decision.reason == "RateLimited"
    assert decision.message == "the load needs 9 replicas; spec.autoscaling.behavior allows no change yet"
    slow = Scaled(settings(queue_depth=1, up=Direction(60.0)), replicas=1).decide(**dict(load))
    assert slow.message == "the load needs 9 replicas; scaling up when that has held for 60 s"


@pytest.mark.parametrize(
    "fields",
    [
        {"num_reporting": 0, "engines": EnginesLoad(), "arrivals": Arrivals()},
        {"num_gateways": 2},
        {"engines": engines(2, truth="stale")},
        {"arrivals": Arrivals()},
        {"engines": EnginesLoad(truth="value")},
    ],
    ids=str,
)
def test_missing_signals_remove_nothing_and_known_ones_still_add(fields: dict[str, Any]) -> None:
    scaled = Scaled(settings(0, kv_cache_usage=0.8, queue_depth=4), replicas=3)
    for _ in range(200):
        decision = scaled.decide(**fields)
        scaled.now += 10
    assert (decision.replicas, decision.reason) == (3, "SignalsMissing")
    assert decision.missing
    assert scaled.decide(**fields, queue=QueueLoad(num_requests=30)).replicas == 8


def test_an_idle_deployment_loses_its_last_replica_and_gets_it_back_for_a_request() -> None:
    scaled = Scaled(settings(0, kv_cache_usage=0.8, queue_depth=4, idle_s=60.0), replicas=1)
    assert scaled.decide(arrivals=arrivals(0.0, idle_s=59.0)).replicas == 1
    decision = scaled.decide(arrivals=arrivals(0.0, idle_s=61.0))
    assert (decision.replicas, decision.reason) == (0, "ScaledToZero")
    nothing = EnginesLoad(truth="value")
    assert scaled.decide(arrivals=arrivals(0.0, idle_s=99.0), engines=nothing).reason == "Steady"
    queue = QueueLoad(num_requests=1, needs_engine=True)
    decision = scaled.decide(arrivals=arrivals(0.0, idle_s=99.0), engines=nothing, queue=queue)
    assert (decision.replicas, decision.reason) == (1, "Woken")


def test_an_slo_without_targets_uses_the_default_targets() -> None:
    scaled = Scaled(settings(slo=Slo(ttft_ms=500.0)), replicas=1)
    decision = scaled.decide(rate=1.0, waiting=7, running=1)
    assert [goal.name for goal in decision.goals] == ["requests", "kvCacheUsage", "queueDepth"]
    assert decision.replicas == 4


counts = st.integers(0, 10**6)


@given(
    st.integers(0, 3),
    st.integers(0, 8),
    st.lists(st.tuples(st.floats(0, 10), counts, counts, counts, st.integers(0, 2)), min_size=1, max_size=8),
)
def test_bounds_hold_and_every_record_can_be_replayed(
    low: int, more: int, course: list[tuple[float, int, int, int, int]]
) -> None:
    chosen = settings(low, max(1, low + more), kv_cache_usage=0.8, queue_depth=2, down=Direction(0.0))
    scaled = Scaled(chosen, replicas=low + 1)
    for active, running, waiting, queued, num_reporting in course:
        load = {"active": active, "running": running, "waiting": waiting, "num_reporting": num_reporting}
        decision = scaled.decide(**load, queue=QueueLoad(num_requests=queued), rate=1.0)
        assert chosen.lowest <= decision.replicas <= chosen.max_replicas
        assert decision.message
        scaled.now += 2
