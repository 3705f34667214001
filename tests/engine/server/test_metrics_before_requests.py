"""Metrics that an engine exports before its first request, because tools look for vLLM's names once, at their start."""

from __future__ import annotations

import pytest

from pagemill_engine.config import EngineConfig
from pagemill_engine.server.metrics import ServerMetrics


@pytest.mark.parametrize(
    "series",
    [
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"}',
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
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
