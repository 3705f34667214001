"""Batch lines use capacity that interactive requests leave free, delay them little, and require no replicas."""

from __future__ import annotations

import msgspec
import pytest

from pagemill_engine.config import EngineConfig
from pagemill_gateway.config import BatchesConfig
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.bounds.schedule import Schedule, ScheduledReplicas
from pagemill_simulator.fleet.figures import Figures, figures_of
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.scaling.policy import FleetScaler, ReplicaBounds
from pagemill_simulator.scaling.simulated import own
from pagemill_simulator.workloads.batches import LINE_PRIORITY, BesideBatch

STEP_TIME = StepTimeParams(knots_tokens=[1, 64, 512, 2048], knot_ms=[24.0, 30.0, 90.0, 330.0], decode_context_ms=2e-5)
ENGINE = EngineConfig(model="sim", num_kv_blocks=4096, max_model_len=8192, max_num_seqs=16, step_time=STEP_TIME)
SETTINGS = FleetSettings(engine=ENGINE, bounds=ReplicaBounds(1, 4), start_replicas=1)
TRAFFIC = BesideBatch(
    rate=1.0,
    period_s=60,
    duration_s=120,
    submitted_s=10,
    num_lines=120,
    prompt_tokens=300,
    output_tokens=40,
    line_prompt_tokens=200,
    line_output_tokens=40,
)
SLO = Slo(ttft_ms=2000.0, tpot_ms=100.0)


def run(
    traffic: BesideBatch, scaler: FleetScaler, *, settings: FleetSettings = SETTINGS, fast: bool = True
) -> tuple[Figures, int]:
    """Return the figures, and the largest number of ordered replicas."""
    outcome = simulate_fleet(traffic.workload(3), settings, scaler, fast=fast)
    figures = figures_of(outcome, slo_ttft_ms=SLO.ttft_ms, slo_tpot_ms=SLO.tpot_ms)
    return figures, max(point.wanted for point in outcome.timeline)


def one() -> FleetScaler:
    return ScheduledReplicas("one", Schedule.constant(1))


def test_lines_are_served_beside_requests_and_counted_separately() -> None:
    alone, _ = run(msgspec.structs.replace(TRAFFIC, num_lines=1), one())
    beside, _ = run(TRAFFIC, one())
    assert (alone.num_lines, beside.num_lines) == (1, 120)
    assert beside.num_line_tokens > 120 * 20
    assert beside.num_requests == alone.num_requests == len(TRAFFIC.requests(3))
    assert beside.ttft_ms.p95 is not None
    assert alone.ttft_ms.p95 is not None
    assert beside.ttft_ms.p95 < 1.5 * alone.ttft_ms.p95


def test_fast_forward_starts_the_same_lines_as_exact_engines() -> None:
    traffic = msgspec.structs.replace(TRAFFIC, num_lines=2000)
    (fast, _), (exact, _) = (run(traffic, one(), fast=fast) for fast in (True, False))
    assert 200 < exact.num_lines < 2000, "as many lines as the free capacity allows"
    assert fast.num_lines == pytest.approx(exact.num_lines, rel=0.03)
    assert fast.ttft_ms.p95 == pytest.approx(exact.ttft_ms.p95, rel=0.1)


def test_fewer_lines_run_if_less_of_an_engine_may_be_used() -> None:
    traffic = msgspec.structs.replace(TRAFFIC, num_lines=2000)
    quarter = msgspec.structs.replace(SETTINGS, batches=BatchesConfig(max_load=0.25))
    few = msgspec.structs.replace(SETTINGS, batches=BatchesConfig(max_concurrency=1))
    numbers = [run(traffic, one(), settings=each)[0].num_lines for each in (few, quarter, SETTINGS)]
    assert numbers == sorted(set(numbers))


def test_lines_require_no_replica() -> None:
    traffic = msgspec.structs.replace(TRAFFIC, num_lines=2000)
    figures, most = run(traffic, own(ScalingSettings("Active", *SETTINGS.bounds, slo=SLO)))
    assert (most, figures.num_scale_ups) == (1, 0)
    # The same work as interactive requests, which arrive within a minute and do not wait for free capacity.
    interactive = [
        each._replace(priority=0, arrival_s=10.0 + index / 10) for index, each in enumerate(traffic.lines(3)[:600])
    ]
    requests = sorted([*traffic.requests(3), *interactive], key=lambda each: each.arrival_s)
    workload = msgspec.structs.replace(traffic.workload(3), requests=requests, lines=[])
    counted = simulate_fleet(workload, SETTINGS, own(ScalingSettings("Active", *SETTINGS.bounds, slo=SLO)), fast=True)
    assert max(point.wanted for point in counted.timeline) > 1, "as interactive requests, they require replicas"


def test_lines_have_low_priority() -> None:
    assert {each.priority for each in TRAFFIC.lines(1)} == {LINE_PRIORITY}
    assert {each.priority for each in TRAFFIC.requests(1)} == {0}
