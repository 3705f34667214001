"""Routing policies on a simulated clock: reproducible, complete, and by default never worse than fewest requests."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from pagemill_engine.config import EngineConfig
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.conversations import TRAFFIC, Conversation, Turn
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.routing_report import report_routing, workload_of
from pagemill_simulator.fleet.settings import FleetSettings, FleetSettingsError
from pagemill_simulator.scaling.fixed import FixedReplicas
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.scaling.simulated import rival

STEP_TIME = StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[6.0, 8.0, 22.0], decode_context_ms=1e-5)
SEEDS = (101, 102, 103)


def fleet(count: int, policy: str, *, num_kv_blocks: int = 2500, **settings: Any) -> FleetSettings:
    engine = EngineConfig(
        model="sim",
        num_kv_blocks=num_kv_blocks,
        max_model_len=16384,
        max_num_seqs=48,
        max_num_waiting=100_000,
        vocab_size=32000,
        step_time=STEP_TIME,
    )
    return FleetSettings(engine=engine, bounds=ReplicaBounds(count, count), routing_policy=policy, **settings)


def some(kind: str, seed: int, share: float = 0.35) -> list[Conversation]:
    traffic = TRAFFIC[kind](seed)
    return traffic[: int(len(traffic) * share)]


@pytest.mark.slow
@pytest.mark.sample("hot prefix", "multi-turn chat")
@pytest.mark.parametrize("kind", TRAFFIC)
def test_cost_is_never_more_than_five_percent_worse_than_fewest_requests(kind: str) -> None:
    """A few seeds; `python bench/routing.py` runs all 30, with their 95 % interval, and all policies."""
    ratios = []
    for seed in SEEDS:
        traffic = some(kind, seed)
        cost, least = (report_routing(traffic, fleet(4, each)) for each in ("Cost", "LeastRequest"))
        assert len(cost.ttft_ms) == len(least.ttft_ms) == sum(len(each.turns) for each in traffic)
        assert cost.num_exact >= 0.99 * len(cost.ttft_ms)
        ratios.append(cost.mean_ttft_ms / least.mean_ttft_ms)
    assert statistics.mean(ratios) <= 1.05, ratios


def test_large_caches_are_published_as_prefix_chunks() -> None:
    traffic = some("multi-turn chat", 7, 0.2)
    report = report_routing(traffic, fleet(2, "Cost", num_kv_blocks=9000))
    assert report.num_cached_tokens > 0
    assert report.num_exact >= 0.99 * len(report.ttft_ms)


def test_equal_traffic_gives_equal_reports() -> None:
    traffic = some("hot prefix", 1, 0.2)
    settings = fleet(3, "PowerOfTwo")
    assert report_routing(traffic, settings) == report_routing(traffic, settings)


def test_a_slow_pod_gets_fewer_requests_if_step_times_are_known() -> None:
    slowness = (1.0, 1.0, 1.0, 5.0)
    traffic = some("long and short", 5)
    cost, least = (report_routing(traffic, fleet(4, each, slowness=slowness)) for each in ("Cost", "LeastRequest"))
    assert cost.mean_ttft_ms < 0.8 * least.mean_ttft_ms


def test_a_waiting_turn_is_sent_its_pause_after_the_answer() -> None:
    turns = [Turn([token] * 40, 5, pause_s=3.0 * token) for token in range(3)]
    requests = workload_of([Conversation(1.0, [7] * 10, turns)])
    settings = fleet(1, "Cost")
    outcome = simulate_fleet(requests, settings, rival(FixedReplicas(), settings.bounds))
    assert [each.num_prompt_tokens for each in outcome.requests] == [50, 95, 140]
    for before, after, turn in zip(outcome.requests, outcome.requests[1:], turns[1:], strict=False):
        assert before.ttft_ms is not None
        assert before.tpot_ms is not None
        ended_s = before.arrival_s + (before.ttft_ms + 4 * before.tpot_ms) / 1000
        assert after.arrival_s - ended_s == pytest.approx(turn.pause_s)


def test_a_fleet_that_cannot_serve_a_workload_says_what_to_change() -> None:
    requests = workload_of([Conversation(0.0, [], [Turn([1] * 40, 5, 0.0)], adapter="french")])
    settings = fleet(1, "Cost")
    policy = rival(FixedReplicas(), settings.bounds)
    with pytest.raises(FleetSettingsError, match="names 1 adapters: give the pods slots"):
        simulate_fleet(requests, settings, policy)
    with pytest.raises(FleetSettingsError, match="simulate it exactly"):
        simulate_fleet(requests, settings, policy, fast=True)
