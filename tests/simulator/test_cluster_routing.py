"""Routing policies on a simulated clock: reproducible, complete, and by default never worse than fewest requests."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from pagemill_engine.config import EngineConfig
from pagemill_protocol.state import StepTimeParams
from pagemill_simulator.cluster import simulate_routing
from pagemill_simulator.conversations import TRAFFIC, Conversation

STEP_TIME = StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[6.0, 8.0, 22.0], decode_context_ms=1e-5)
SEEDS = (101, 102, 103)


def engines(count: int, **settings: Any) -> list[EngineConfig]:
    config = {
        "model": "sim",
        "num_kv_blocks": 2500,
        "max_model_len": 16384,
        "max_num_seqs": 48,
        "max_num_waiting": 100_000,
        "vocab_size": 32000,
        "step_time": STEP_TIME,
    }
    return [EngineConfig(**{**config, **settings}) for _ in range(count)]


def some(kind: str, seed: int, share: float = 0.35) -> list[Conversation]:
    traffic = TRAFFIC[kind](seed)
    return traffic[: int(len(traffic) * share)]


@pytest.mark.sample("hot prefix", "multi-turn chat")
@pytest.mark.parametrize("kind", TRAFFIC)
def test_cost_is_never_more_than_five_percent_worse_than_fewest_requests(kind: str) -> None:
    """A few seeds; `python bench/routing.py` runs all 30, with their 95 % interval, and all policies."""
    ratios = []
    for seed in SEEDS:
        traffic = some(kind, seed)
        cost, least = (simulate_routing(traffic, engines(4), each) for each in ("Cost", "LeastRequest"))
        assert len(cost.ttft_ms) == len(least.ttft_ms) == sum(len(each.turns) for each in traffic)
        assert cost.num_exact >= 0.99 * len(cost.ttft_ms)
        ratios.append(cost.mean_ttft_ms / least.mean_ttft_ms)
    assert statistics.mean(ratios) <= 1.05, ratios


def test_large_caches_are_published_as_prefix_chunks() -> None:
    traffic = some("multi-turn chat", 7, 0.2)
    report = simulate_routing(traffic, engines(2, num_kv_blocks=9000), "Cost")
    assert report.num_cached_tokens > 0
    assert report.num_exact >= 0.99 * len(report.ttft_ms)


def test_equal_traffic_gives_equal_reports() -> None:
    traffic = some("hot prefix", 1, 0.2)
    assert simulate_routing(traffic, engines(3), "PowerOfTwo") == simulate_routing(traffic, engines(3), "PowerOfTwo")


def test_a_slow_pod_gets_fewer_requests_if_step_times_are_known() -> None:
    slow = StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[30.0, 40.0, 110.0])
    pods = [*engines(3), *engines(1, step_time=slow)]
    traffic = some("long and short", 5)
    cost, least = (simulate_routing(traffic, pods, each) for each in ("Cost", "LeastRequest"))
    assert cost.mean_ttft_ms < 0.8 * least.mean_ttft_ms
