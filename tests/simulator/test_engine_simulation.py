"""One engine on a simulated clock: reproducible, complete, and plausible."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from pagemill_engine.config import EngineConfig
from pagemill_protocol.report.prediction import OfferedLoad, Predictor
from pagemill_protocol.report.shape import Shape
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.engine import EngineSimulation, Percentiles, simulate
from pagemill_simulator.workloads.request import SimRequest
from pagemill_simulator.workloads.shapes import Steady

PARAMS = StepTimeParams(knots_tokens=[1, 512, 2048], knot_ms=[6.0, 22.0, 80.0], decode_context_ms=1e-5)


def config(**settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "model": "sim",
        "num_kv_blocks": 4000,
        "max_model_len": 16384,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "max_num_waiting": 100_000,
    }
    return EngineConfig(**{**defaults, **settings})


def drawn(count: int, *, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Generate requests with the lengths of Azure's conversations."""
    return Steady(rate=rate_per_s, duration_s=3 * count / rate_per_s).requests(seed)[:count]


def test_every_request_ends_once_and_all_tokens_are_generated() -> None:
    trace = drawn(150, rate_per_s=4, seed=1)
    report = simulate(trace, config(), PARAMS)
    assert (report.num_finished, report.num_refused) == (150, 0)
    assert report.num_output_tokens == sum(request.num_output_tokens for request in trace)
    assert report.num_prompt_tokens == sum(request.num_prompt_tokens for request in trace)


def test_equal_traces_give_equal_reports() -> None:
    trace = drawn(80, rate_per_s=8, seed=2)
    assert simulate(trace, config(), PARAMS) == simulate(trace, config(), PARAMS)
    assert simulate(drawn(80, rate_per_s=8, seed=3), config(), PARAMS) != simulate(trace, config(), PARAMS)


def test_a_single_request_takes_the_time_of_its_steps() -> None:
    report = simulate([SimRequest(3.0, 512, 11)], config(), PARAMS)
    assert report.ttft_s.p50 == pytest.approx(0.022)
    assert report.tpot_ms.p50 == pytest.approx(6.0, rel=0.01)
    assert report.num_steps == 11
    assert report.busy_share == pytest.approx(1.0)
    assert report.duration_s == pytest.approx(0.082, rel=0.01)


def test_a_full_cache_preempts_and_loses_no_request() -> None:
    # There are many long answers to short prompts, whose growth admission cannot predict.
    trace = [SimRequest(0.0, 30, 400) for _ in range(40)]
    simulation = EngineSimulation(trace, config(num_kv_blocks=400), PARAMS)
    report = simulation.run()
    assert report.num_preemptions > 0
    assert report.num_finished == 40
    assert report.num_output_tokens == 40 * 400
    assert simulation.core.load().num_kv_bytes_active == 0


def test_with_more_load_requests_wait_longer() -> None:
    calm, busy = (simulate(drawn(150, rate_per_s=rate, seed=4), config(), PARAMS) for rate in (1, 40))
    assert busy.ttft_s.p90 > calm.ttft_s.p90
    assert busy.tpot_ms.p50 > calm.tpot_ms.p50
    assert busy.busy_share > calm.busy_share


def test_a_request_that_can_never_fit_is_refused_and_counted() -> None:
    trace = [SimRequest(0.0, 20_000, 5), SimRequest(0.0, 10, 5)]
    report = simulate(trace, config(), PARAMS)
    assert (report.num_finished, report.num_refused) == (1, 1)
    assert report.refusals == {"context_length_exceeded": 1}


def test_simulated_time_is_cheap() -> None:
    started_s = time.process_time()
    report = simulate([SimRequest(3600.0 * index, 100, 20) for index in range(24)], config(), PARAMS)
    assert report.duration_s > 23 * 3600
    assert time.process_time() - started_s < 5


def test_kv_waste_of_a_mixed_workload_is_below_four_percent() -> None:
    report = simulate(drawn(200, rate_per_s=20, seed=5), config(block_size=16), PARAMS)
    assert 0 < report.kv_waste_mean < 0.04


def test_percentiles_are_nearest_ranks() -> None:
    assert Percentiles.of([]) == Percentiles()
    assert Percentiles.of([5.0]) == Percentiles(5.0, 5.0, 5.0, 5.0)
    assert Percentiles.of(list(range(100, 0, -1))) == Percentiles(50, 90, 99, 100)


@pytest.mark.parametrize(("stages", "draft_ms"), [(1, 1.5), (2, 0.0)])
def test_decodes_sample_and_compute_what_the_step_times_say(stages: int, draft_ms: float) -> None:
    """An answer of 401 tokens takes 160 steps of 2.5 tokens behind its first, each as long as one of four tokens
    and of drafting. One of stages passes all of them."""
    step_time = StepTimeParams(
        knots_tokens=[1, 4, 2048], knot_ms=[6.0, 9.0, 90.0],
        tokens_per_decode=2.5, computed_per_decode=4.0, draft_ms=draft_ms, stages=stages,
    )  # fmt: skip
    trace = [SimRequest(40.0 * index, 64, 401) for index in range(20)]
    simulation = EngineSimulation(trace, config(pipeline_parallel_size=stages), step_time)
    report = simulation.run()
    assert report.num_output_tokens == 20 * 401
    assert report.num_steps / 20 == pytest.approx(1 + 400 / 2.5, rel=0.03)
    assert report.tpot_ms.p50 == pytest.approx(stages * (9.0 + draft_ms) / 2.5, rel=0.03)
    assert simulation.core._proposals is not None
    assert simulation.core._proposals.per_decode[:2] == pytest.approx((2.5, 4.0), rel=0.1)
    shape = Shape(4000, 16, 128, 2048, step_time)
    predicted = Predictor(shape, 0.5).predict(OfferedLoad(1 / 40, 64, 64, 64, 401), 1)
    assert predicted.tpot_ms == pytest.approx(report.tpot_ms.p50, rel=0.05)


def test_rejected_tokens_take_blocks_and_budget_and_lose_no_request() -> None:
    step_time = msgspec.structs.replace(PARAMS, tokens_per_decode=1.5, computed_per_decode=5.0)
    trace = [SimRequest(0.0, 30, 400) for _ in range(40)]
    simulation = EngineSimulation(trace, config(num_kv_blocks=400, max_num_batched_tokens=128), step_time)
    report = simulation.run()
    assert report.num_preemptions > 0
    assert report.num_output_tokens == 40 * 400
    assert simulation.core.load().num_kv_bytes_active == 0
