"""Traces: lengths and arrivals from a CSV, or drawn with the same shape."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from pagemill_simulator.traces import TraceError, TraceRequest, read_azure_trace, synthetic_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_azure_traces_are_read_from_their_first_arrival(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.csv",
        HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    )
    trace = read_azure_trace(path)
    assert trace[0] == TraceRequest(0.0, 374, 44)
    assert trace[1].arrival_s == pytest.approx(4.314579)
    assert read_azure_trace(path, limit=1) == trace[:1]
    assert read_azure_trace(path, speedup=2)[1].arrival_s == pytest.approx(2.15728, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER, "holds no request"),
        (HEADER + "yesterday,1,2\n", "trace.csv:2"),
        (HEADER + "2023-11-16 18:15:46,many,2\n", "trace.csv:2"),
        ("a,b\n1,2\n", "expected the columns TIMESTAMP"),
    ],
)
def test_a_trace_that_cannot_be_read_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_azure_trace(write(tmp_path / "trace.csv", text))


def test_a_missing_trace_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_azure_trace(tmp_path / "none.csv")


def test_synthetic_traces_have_the_shape_of_the_real_one() -> None:
    trace = synthetic_trace(4000, rate_per_s=5, seed=1)
    assert trace == synthetic_trace(4000, rate_per_s=5, seed=1)
    assert trace[-1].arrival_s == pytest.approx(800, rel=0.1)
    assert statistics.mean(request.num_prompt_tokens for request in trace) == pytest.approx(1155, rel=0.15)
    assert statistics.mean(request.num_output_tokens for request in trace) == pytest.approx(211, rel=0.15)
    assert min(min(request[1:]) for request in trace) >= 1
