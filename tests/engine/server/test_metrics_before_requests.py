"""Metrics that an engine exports before its first request, because tools look for vLLM's names once, at their start."""

from __future__ import annotations

import dataclasses
import re

import pytest
from engine_ready import LIMITS, engine_ready

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import StepOutputs, TokensOut
from pagemill_engine.server.metrics import RequestTiming, ServerMetrics
from pagemill_protocol.report.cache_kinds import CacheKind
from pagemill_protocol.report.state import EngineLoad, KindBytes, RankTimes


@pytest.mark.parametrize(
    "series",
    [
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"}',
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:num_requests_running",
    ],
)
def test_vllms_series_start_at_zero(series: str) -> None:
    lines = ServerMetrics("m", EngineConfig(model="m")).scrape("").body.decode().splitlines()
    (line,) = [each for each in lines if each.startswith(series)]
    assert line.endswith(" 0.0")


def test_the_time_of_each_rank_is_counted() -> None:
    metrics = ServerMetrics("m", EngineConfig(model="m"))
    metrics.step(StepOutputs())
    assert "rank_compute" not in "".join(each for each in lines_of(metrics) if not each.startswith("#"))
    for seconds in ([1.0, 2.0], [1.5, 4.0]):
        metrics.step(StepOutputs(ranks=RankTimes(seconds)))
        metrics.step(StepOutputs())
    found = [each for each in lines_of(metrics) if each.startswith("pagemill_engine_rank_compute_seconds_total")]
    assert found == [
        f'pagemill_engine_rank_compute_seconds_total{{model_name="m",rank="{rank}"}} {seconds}'
        for rank, seconds in enumerate((1.5, 4.0))
    ]


def lines_of(metrics: ServerMetrics) -> list[str]:
    return metrics.scrape("").body.decode().splitlines()


def test_proposed_tokens_are_counted_by_their_place() -> None:
    metrics = ServerMetrics("m", EngineConfig(model="m"))
    timing = RequestTiming(arrival_s=0.0)
    for num_accepted in (0, 1, 3):
        tokens = list(range(num_accepted + 1))
        metrics.tokens(
            timing, TokensOut(request_id="r", token_ids=tokens, num_proposed=4, num_accepted=num_accepted), 1
        )
    metrics.step(StepOutputs(gained_ms=2500.0))
    metrics.step(StepOutputs(gained_ms=-500.0))
    lines = metrics.scrape("").body.decode().splitlines()
    values = {line.partition("{")[0]: line.rpartition(" ")[2] for line in lines if "_per_pos_total" not in line}
    assert values["vllm:spec_decode_num_drafts_total"] == "3.0"
    assert values["vllm:spec_decode_num_draft_tokens_total"] == "12.0"
    assert values["vllm:spec_decode_num_accepted_tokens_total"] == "4.0"
    assert values["pagemill_engine_speculation_gain_seconds"] == "2.0"
    places = [
        line.rpartition(" ")[2] for line in lines if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos")
    ]
    assert places == ["2.0", "1.0", "1.0"]


def test_bytes_of_states_stand_beside_those_of_keys_and_values() -> None:
    metrics = ServerMetrics("m", EngineConfig(model="m"))
    kinds = (CacheKind(), CacheKind("state", state=True))
    metrics.ready(engine_ready(limits=dataclasses.replace(LIMITS, kinds=kinds)))
    load = EngineLoad(num_kv_bytes_total=150, kind_bytes=[KindBytes(100, 30, 20), KindBytes(50, 5, 7)])
    metrics.step(StepOutputs(load=load))
    lines = [line for line in lines_of(metrics) if line.startswith("pagemill_engine_kv_bytes{")]
    found = {tuple(re.findall(r'(?:kind|state)="(\w+)"', line)): float(line.rpartition(" ")[2]) for line in lines}
    assert found == {
        ("full", "active"): 30, ("full", "evictable"): 20, ("full", "free"): 50,
        ("state", "active"): 5, ("state", "evictable"): 7, ("state", "free"): 38,
    }  # fmt: skip
