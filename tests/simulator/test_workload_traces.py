"""Trace files: lengths and arrivals in several formats; an invalid line is reported or counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_simulator.workloads.request import SimRequest
from pagemill_simulator.workloads.traces import TraceError, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURSTGPT_2 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def logged(**fields: object) -> str:
    reported = {"event": "request", "route": "/v1/chat/completions", "arrived_at": 100.0, "prompt_tokens": 5}
    return json.dumps({**reported, "completion_tokens": 7, **fields}) + "\n"


def test_azure_traces_start_at_their_first_arrival(tmp_path: Path) -> None:
    path = write(
        tmp_path / "conversations.csv",
        AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    )
    workload = read_trace(path)
    assert workload.requests[0] == SimRequest(0.0, 374, 44)
    assert workload.requests[1].arrival_s == workload.duration_s == pytest.approx(4.314579)
    assert (workload.name, "Azure" in workload.source, "2 requests" in workload.source) == ("conversations", True, True)
    assert read_trace(path, limit=1).requests == workload.requests[:1]
    assert read_trace(path, speedup=2).requests[1].arrival_s == pytest.approx(2.15728, abs=1e-4)


def test_azure_times_since_2024_have_an_offset(tmp_path: Path) -> None:
    path = write(
        tmp_path / "week.csv",
        AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 01:00:01.509930+01:00,2399,6\n",
    )
    assert read_trace(path).requests[1].arrival_s == pytest.approx(1.5)


def test_burstgpt_is_read_without_its_failed_requests(tmp_path: Path) -> None:
    path = write(
        tmp_path / "burst.csv",
        BURSTGPT + "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"
        "50,ChatGPT,23,0,23,API log\n118,GPT-4,417,276,693,Conversation log\n",
    )
    workload = read_trace(path)
    assert [request[:3] for request in workload.requests] == [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276)]
    assert "1 without an answer left out" in workload.source


def test_burstgpt_sessions_are_kept(tmp_path: Path) -> None:
    path = write(
        tmp_path / "burst.csv",
        BURSTGPT_2 + "5,abc,1.2,ChatGPT,472,18,490,Conversation log\n6,,0.3,ChatGPT,10,8,18,API log\n"
        "9.5,xyz,1,GPT-4,4,4,8,Conversation log\n45,abc,2,ChatGPT,900,30,930,Conversation log\n",
    )
    assert [request.session for request in read_trace(path).requests] == [0, None, 1, 0]


def test_a_gateways_log_is_a_trace(tmp_path: Path) -> None:
    """Lines are written when requests end, among others, and `kubectl logs --prefix` puts the pod before them."""
    path = write(
        tmp_path / "log.jsonl",
        '{"event": "listening", "port": 8080}\n'
        + logged(arrived_at=130.5, completion_tokens=70)
        + "[pod/gateway-0/gateway] "
        + logged(arrived_at=100.25, route="/v1/completions")
        + logged(route="/v1/models")
        + '{"event": "request", "route": "/v1/completions", "status": 429, "arrived_at": 7}\n',
    )
    workload = read_trace(path)
    assert list(workload.requests) == [SimRequest(0.0, 5, 7), SimRequest(30.25, 5, 70)]
    assert "1 without an answer left out" in workload.source
    assert read_trace(path, limit=1).requests[0].num_output_tokens == 7, "the first request by arrival, not by line"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE, "holds no request"),
        ("", "holds no request; expected a CSV"),
        (AZURE + "yesterday,1,2\n", r"trace.csv:2: expected TIMESTAMP as in .* got 'yesterday'"),
        (AZURE + "2023-11-16 18:15:46,1,2\n\n2023-11-16 18:15:46,many,2\n", r"trace.csv:4: expected ContextTokens"),
        (AZURE + "2023-11-16 18:15:46,1\n", r"trace.csv:2: expected at least 3 fields, got 2"),
        (AZURE + "2023-11-16 18:15:46,-1,2\n", r"trace.csv:2: expected ContextTokens as a whole number"),
        (AZURE + f"2023-11-16 18:15:46,{'9' * 5000},2\n", r"trace.csv:2: expected ContextTokens"),
        (BURSTGPT + "nan,ChatGPT,472,18,490,x\n", r"trace.csv:2: expected Timestamp in seconds, got 'nan'"),
        (BURSTGPT + '5,"ChatGPT,472,18,490,x\n', r"trace.csv:2: expected comma-separated fields"),
        (logged() + logged(arrived_at=None), r"trace.csv:2: expected arrived_at in seconds, got None"),
        (logged() + logged(prompt_tokens=2.5), r"trace.csv:2: expected prompt_tokens as a whole number"),
        (logged() + "Traceback (most recent call last):\n", r"trace.csv:2: expected a JSON object"),
        ("a,b\n1,2\n", r"trace.csv:1: no trace of a known kind: expected a CSV with the columns TIMESTAMP"),
        ("\x00\x01\x02", r"trace.csv:1: no trace of a known kind"),
    ],
)
def test_an_unreadable_trace_is_reported_with_line_and_expected_format(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "trace.csv", text))


def test_invalid_lines_are_skipped_and_counted_if_requested(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.csv",
        AZURE + "2023-11-16 18:15:46,1,2\nnonsense\n2023-11-16 18:15:47,x,2\n2023-11-16 18:15:48,3,4\n",
    )
    with pytest.raises(TraceError, match="mend or remove the line, or leave such lines out"):
        read_trace(path)
    workload = read_trace(path, skip_broken=True)
    assert list(workload.requests) == [SimRequest(0.0, 1, 2), SimRequest(2.0, 3, 4)]
    assert "2 broken lines left out, the first line 3: expected at least 3 fields" in workload.source
    only_broken = write(tmp_path / "all.csv", AZURE + "nonsense\n")
    with pytest.raises(TraceError, match="1 lines are broken, the first is line 2"):
        read_trace(only_broken, skip_broken=True)


def test_an_invalid_option_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", AZURE + "2023-11-16 18:15:46,1,2\n")
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="limit: 0"):
        read_trace(path, limit=0)
    for speedup in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TraceError, match="speedup"):
            read_trace(path, speedup=speedup)


@given(
    first=st.sampled_from([AZURE, BURSTGPT, BURSTGPT_2, logged()]),
    lines=st.lists(st.text(st.characters(exclude_characters="\r\n"), max_size=80), max_size=8),
)
def test_any_file_gives_requests_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, first: str, lines: list[str]
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace"
    path.write_bytes((first + "\n".join(lines)).encode("utf-8", "surrogatepass"))
    try:
        workload = read_trace(path, skip_broken=True)
    except TraceError:
        return
    assert workload.requests
    assert [request.arrival_s for request in workload.requests] == sorted(r.arrival_s for r in workload.requests)
    assert min(min(request[1:3]) for request in workload.requests) >= 1
