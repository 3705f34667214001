"""The comparison with other engines: its work, its figures and ratios, and failing peers."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from peers import http_load, rows
from peers.catalogue import OURS, PRECISIONS, Peer, Precision, Worker, peers
from peers.metrics import METRICS, percentile
from peers.results import Problem, Results, Sample, load, merge
from peers.rows import QUICK, ROWS
from peers.session import Session
from peers.table import markdown, ratios
from waiting import WAIT_LIMIT_S

BENCH = Path(__file__).resolve().parents[2] / "bench"
MACHINE = {"cpu": "a", "cores": 2}
MIXED = next(metric for metric in METRICS if metric.key == "tok_per_s" and metric.row == "mixed")


def peer(name: str, precision: Precision = "float", worker: Any = None) -> Peer:
    return Peer(name, precision, "q4_1", "", lambda _uv: None, worker, None)


def results(*samples: Sample, problems: tuple[Problem, ...] = ()) -> Results:
    return Results(MACHINE, False, list(samples), list(problems))


def mixed(name: str, *speeds: float) -> list[Sample]:
    return [Sample(name, "mixed", run, {"tok_per_s": speed}) for run, speed in enumerate(speeds)]


def row_of(text: str, title: str) -> list[str]:
    """Return the row of the first table that has it."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {title} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_peer_has_its_own_name_and_a_way_to_start() -> None:
    known = peers()
    assert {each.precision for each in known.values()} == set(PRECISIONS)
    assert all(each.worker or each.server for each in known.values())
    assert {name for name in known if name.startswith(OURS)} == {f"{OURS}-{each}" for each in PRECISIONS}


def test_runs_have_equal_lengths_and_different_prompts() -> None:
    first, second = rows.mixed(64, 0), rows.mixed(64, 1)
    assert [(len(ids), num) for ids, num in first] == [(len(ids), num) for ids, num in second]
    assert all(a != b for (a, _), (b, _) in zip(first, second, strict=True))
    assert all(16 <= len(ids) <= 256 and 16 <= num <= 128 for ids, num in first)
    assert rows.mixed(64, 0) == first, "a run must be reproducible"


def test_the_prefix_row_shares_exactly_the_prefix() -> None:
    prompts = [ids for ids, _ in rows.prefix(0)]
    assert len({tuple(ids[:768]) for ids in prompts}) == 1
    assert len({tuple(ids[768:]) for ids in prompts}) == len(prompts) == 16


def test_three_online_runs_have_at_least_300_requests() -> None:
    assert all(3 * num >= 300 for num in rows.FULL.online_requests.values())
    assert set(rows.FULL.online_requests) == {row.name for row in ROWS.values() if row.form == "online"}


def test_the_ratio_is_to_the_best_peer_of_the_same_precision() -> None:
    known = [peer("pagemill-float"), peer("slow"), peer("fast"), peer("coarse", "4-bit")]
    ours = mixed("pagemill-float", 90, 300, 100)
    measured = results(*ours, *mixed("slow", 20), *mixed("fast", 50), *mixed("coarse", 900))
    assert ratios(measured, known) == {"float": {MIXED.title: 2.0}}
    text = markdown(measured, known)
    assert row_of(text, MIXED.title) == [MIXED.title, "100", "20.0", "50.0", "2.00", "1.5, met"]
    assert "coarse" in text


def test_for_durations_the_smaller_value_is_better() -> None:
    known = [peer("pagemill-float"), peer("other")]
    measured = results(
        Sample("pagemill-float", "prefix", 0, {"seconds": 4.0}), Sample("other", "prefix", 0, {"seconds": 2.0})
    )
    assert ratios(measured, known)["float"] == {"16 requests sharing 768 tokens, s": 0.5}
    assert row_of(markdown(measured, known), "16 requests sharing 768 tokens, s")[-1] == "1.3, missed"


def test_memory_is_compared_with_openvino_only() -> None:
    known = [peer("pagemill-float"), peer("openvino-f16"), peer("tiny")]
    memory = zip(known, (500.0, 1000.0, 10.0), strict=True)
    measured = results(*[Sample(each.name, "mixed", 0, {"peak_mib": mib}) for each, mib in memory])
    assert ratios(measured, known)["float"] == {"peak memory of the mixed row, MiB": 2.0}


def test_percentiles_include_the_requests_of_all_runs() -> None:
    known = [peer("pagemill-float"), peer("other")]
    runs = [[10.0] * 99 + [50.0], [20.0] * 100, [30.0] * 100]
    samples = [Sample("pagemill-float", "online-8", run, {"ttft_ms": values}) for run, values in enumerate(runs)]
    measured = results(*samples, Sample("other", "online-8", 0, {"ttft_ms": [60.0]}))
    found = ratios(measured, known)["float"]
    assert found["online, 8 clients: TTFT p50, ms"] == 3.0
    assert found["online, 8 clients: TTFT p99, ms"] == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.0


def test_the_goal_of_a_start_is_in_seconds() -> None:
    known = [peer("pagemill-int8", "int8")]
    measured = results(Sample("pagemill-int8", "start", 0, {"seconds": 3.5}))
    assert row_of(markdown(measured, known), "process start to ready, s") == [
        "process start to ready, s", "3.50", "", "at most 4, met",
    ]  # fmt: skip


def test_failures_are_shown_with_their_cause() -> None:
    known = [peer("pagemill-float"), peer("broken")]
    problem = Problem("broken", "mixed", "ended with SIGILL")
    text = markdown(results(*mixed("pagemill-float", 1), problems=(problem,)), known)
    assert row_of(text, MIXED.title)[2] == "failed"
    assert "- broken: ended with SIGILL" in text


def test_parts_are_merged_and_those_of_other_machines_refused(tmp_path: Path) -> None:
    first = results(*mixed("other", 1.0), problems=(Problem("other", "prefix", "later done"),))
    first.save(tmp_path / "first.json")
    second = results(Sample("other", "prefix", 0, {"seconds": 1.0}), *mixed("other", 3.0))
    merged = merge([load(tmp_path / "first.json"), second])
    assert merged.values("other", "mixed", "tok_per_s") == [1.0, 3.0]
    assert merged.cause("other", "prefix") is None, "a later run succeeded"
    with pytest.raises(ValueError, match="different machines"):
        merge([first, Results({"cpu": "b", "cores": 2}, False)])


WORKER = """
import os, sys
from peers.wire import serve
def load():
    print("engines like to print")
    return (lambda jobs: [[7] * {num} for _, num in jobs]), {{"engine": "fake"}}
{before}
serve(load)
"""


def worker(before: str = "", num: str = "num") -> Any:
    script = WORKER.format(before=before, num=num)
    return lambda _weights: Worker([sys.executable, "-c", script], {"PYTHONPATH": str(BENCH)})


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Session:
    monkeypatch.setattr("peers.session.FOLDER", tmp_path)
    monkeypatch.setattr("peers.weights.path_of", lambda kind: tmp_path / kind)
    return Session(QUICK, runs=range(2), timeout_s=30.0, quick=True)


def test_peers_take_turns(session: Session) -> None:
    session.measure([ROWS["mixed"], ROWS["prefill"]], [peer("one", worker=worker()), peer("two", worker=worker())])
    found = [(sample.row, sample.run, sample.peer) for sample in session.results.samples]
    assert found == [(row, run, name) for row in ("mixed", "prefill") for run in (0, 1) for name in ("one", "two")]
    assert session.results.about["one"] == {"engine": "fake"}
    assert all(value > 0 for value in session.results.values("one", "mixed", "peak_mib"))


@pytest.mark.parametrize(
    ("before", "num", "cause"),
    [
        ("os.kill(os.getpid(), 4)", "num", "SIGILL"),
        ("sys.exit('no such model')", "num", "exit code 1: no such model"),
        ("", "max(0, num - 1)", "other lengths"),
    ],
)
def test_a_failed_peer_is_recorded_with_its_cause_and_the_others_continue(
    session: Session, before: str, num: str, cause: str
) -> None:
    session.measure([ROWS["prefix"]], [peer("bad", worker=worker(before, num)), peer("good", worker=worker())])
    assert [problem.peer for problem in session.results.problems] == ["bad"]
    assert cause in session.results.problems[0].cause
    assert len(session.results.values("good", "prefix", "seconds")) == 2


@contextmanager
def completions(num_tokens: int) -> Iterator[str]:
    """Run a server that streams `num_tokens` tokens for every request."""
    events = [{"choices": [{"text": "a", "finish_reason": None}]}] * num_tokens
    events.append({"choices": [], "usage": {"completion_tokens": num_tokens}})
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in request.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        writer.write((head + stream).encode())
        await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.append(server.sockets[0].getsockname()[1])
        listening.set()
        await asyncio.get_running_loop().run_in_executor(None, done.wait)
        server.close()

    port: list[int] = []
    listening, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert listening.wait(WAIT_LIMIT_S)
    yield f"http://127.0.0.1:{port[0]}"
    done.set()
    thread.join(WAIT_LIMIT_S)


def test_the_load_generator_times_every_request() -> None:
    with completions(5) as url:
        seconds, answers = http_load.send(url, "m", [([1, 2], 5)] * 7, clients=3)
    assert len(answers) == 7
    assert all(len(answer.gaps_s) == 4 and 0 < answer.ttft_s <= answer.e2e_s <= seconds for answer in answers)


def test_an_answer_of_another_length_is_an_error() -> None:
    with completions(5) as url, pytest.raises(ExceptionGroup) as raised:
        http_load.send(url, "m", [([1], 6)], clients=1)
    assert "5 tokens" in str(raised.value.exceptions[0])
