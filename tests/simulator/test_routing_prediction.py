"""The predicted TTFT compared with the actual one, on pods with the real scheduler and loop."""

from __future__ import annotations

import statistics

import pytest

from pagemill_engine.config import EngineConfig
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.conversations import TRAFFIC, at_rate
from pagemill_simulator.fleet.routing_report import report_routing
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.scaling.policy import ReplicaBounds

STEP_TIME = StepTimeParams(
    knots_tokens=[1, 64, 512], knot_ms=[6.0, 8.0, 22.0], decode_context_ms=1e-5, chunk_context_ms=1e-7
)
LIMIT = 0.3


ENGINE = EngineConfig(
    model="sim",
    num_kv_blocks=2500,
    max_model_len=16384,
    max_num_seqs=48,
    max_num_batched_tokens=512,
    max_num_waiting=100_000,
    vocab_size=32000,
    step_time=STEP_TIME,
)


@pytest.mark.sample("*-middle", "hot prefix-*")
@pytest.mark.parametrize("rate", [0.5, 1.0, 1.7], ids=["low", "middle", "high"])
@pytest.mark.parametrize("kind", TRAFFIC)
def test_the_median_error_of_the_ttft_that_routing_compares_is_bounded(kind: str, rate: float) -> None:
    """`python bench/routing.py` runs all seeds."""
    traffic = TRAFFIC[kind](11)
    traffic = at_rate(traffic[: len(traffic) * 3 // 5], rate)
    report = report_routing(traffic, FleetSettings(engine=ENGINE, bounds=ReplicaBounds(4, 4), seed=11))
    assert len(report.ttft_errors) == len(report.ttft_ms)
    assert statistics.median(map(abs, report.ttft_errors)) <= LIMIT
