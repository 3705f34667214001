"""The comparison of simulator and real engine: percentiles, spread and error, for equal requests."""

from __future__ import annotations

import pytest
import simulator_truth
from truth.compare import COLUMNS, Band, Comparison, Latencies, comparisons, plan_rows, quantile, rows
from truth.generator import Answer, latencies
from truth.site import engine_of

from pagemill_protocol.report.state import EngineLoad, StateFrame, StepTimeParams
from pagemill_simulator.workloads.request import SimRequest, Workload

FIT = StepTimeParams(knots_tokens=[1, 512], knot_ms=[10.0, 400.0])
STATE = StateFrame(
    sequence=1,
    step_time=FIT,
    max_model_len=2048,
    max_num_batched_tokens=512,
    max_num_seqs=64,
    load=EngineLoad(num_kv_bytes_total=1024),
)


def answer(ttft_ms: float, tpot_ms: float | None) -> Answer:
    return Answer(lag_ms=0.0, ttft_ms=ttft_ms, tpot_ms=tpot_ms, end_s=1.0)


def test_percentiles_are_measured_values() -> None:
    assert quantile([30.0, 10.0, 20.0, 40.0], 50) == 20.0
    assert quantile(map(float, range(1, 101)), 95) == 95.0
    assert quantile([7.0], 95) == 7.0


def test_the_error_is_that_of_the_mean_and_the_spread_is_from_lowest_to_highest() -> None:
    found = Comparison("TTFT p50", [90.0, 110.0], 115.0)
    assert found.measured == 100.0
    assert found.error == pytest.approx(0.15)
    assert found.spread == pytest.approx(0.2)
    assert Comparison("TTFT p50", [100.0], 75.0).error == pytest.approx(-0.25)


def test_answers_of_one_token_have_no_time_per_token() -> None:
    assert latencies([answer(50.0, None), answer(70.0, 9.0)]) == Latencies([50.0, 70.0], [9.0])


def test_a_band_has_a_row_for_each_figure_of_repeats_and_simulation() -> None:
    runs = [Latencies([100.0, 200.0], [10.0, 20.0]), Latencies([120.0, 220.0], [12.0, 20.0])]
    band = Band("low", 0.5, 2, runs, Latencies([110.0, 231.0], [11.0, 15.0]))
    assert [each.figure for each in comparisons(band)] == ["TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95"]
    table = rows([band])
    assert all(len(row) == len(COLUMNS) for row in table)
    assert table[1] == ["low: 2 requests at 0.50/s", "TTFT p95", "210.0", "200.0, 220.0", "10", "231.0", "+10"]
    assert table[3][-1] == "-25"


def test_one_repeat_has_no_spread() -> None:
    assert plan_rows(2.0, [Comparison("TPOT p50", [10.0], 11.0)]) == [
        ["plan: 2.00/s", "TPOT p50", "10.0", "10.0", "-", "11.0", "+10"]
    ]


def test_equal_lengths_and_times_are_replayed_with_prompts_without_common_prefixes() -> None:
    requests = [SimRequest(0.0, 20, 4), SimRequest(1.5, 30, 8)]
    first, second = simulator_truth.real(requests, "low 0")
    assert [(first.at_s, len(first.prompt), first.num_tokens)] == [(0.0, 20, 4)]
    assert [(second.at_s, len(second.prompt), second.num_tokens)] == [(1.5, 30, 8)]
    assert first.prompt[:4] != second.prompt[:4]
    assert simulator_truth.real(requests, "high 0")[0].prompt[:4] != first.prompt[:4]


def test_a_single_request_is_simulated_with_the_reported_step_times() -> None:
    engine = engine_of(STATE)
    alone = Workload(name="alone", source="", requests=[SimRequest(0.5, 512, 11)], duration_s=1.0)
    found = simulator_truth.simulate(alone, engine)
    assert found.tpots_ms == [pytest.approx(10.0)]
    # The prompt is one step; the rest is the network between gateway and engine.
    assert 400.0 <= found.ttfts_ms[0] < 410.0


def test_the_capacity_is_the_rate_at_which_many_requests_are_served() -> None:
    slow = engine_of(STATE)
    lengths = {"prompt_tokens": 120.0, "output_tokens": 60.0, "longest_prompt": 700, "longest_output": 240}
    held = simulator_truth.capacity(slow, lengths)
    # Steps of 512 tokens take 400 ms, prompts have some 120 tokens, and decodes share the steps.
    assert 5.0 < held < 512 / 0.4 / 120
