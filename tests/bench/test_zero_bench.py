"""The benches of scaling to zero and of the ramp: their traffic, counts and differences."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from exact_load import Record, prompts
from local_ramp import Phase, table_rows
from local_replicas import Replica, Up
from zero_cycles import IDLE_S, MOMENTS, draw_arrival, overheads_s, percentile, table_row
from zero_simulated import Totals, count_cycles, simulate_visits, visits


def record(sent_s: float, seconds: float, ttft_s: float | None = None, outcome: str = "complete") -> Record:
    return Record(cast(Any, outcome), ttft_s is not None, seconds, ttft_s, "", sent_s)


def test_equal_seeds_give_equal_arrivals_of_all_kinds() -> None:
    asked = prompts(8)
    drawn = [[draw_arrival(source, asked) for _ in range(200)] for source in (random.Random(3), random.Random(3))]
    assert drawn[0] == drawn[1]
    arrivals = drawn[0]
    assert {each.moment for each in arrivals} == set(MOMENTS)
    assert {len(each.requests) for each in arrivals} == {1, 2, 3}
    assert {streamed for each in arrivals for _, streamed in each.requests} == {True, False}
    assert any(each.late_s is not None for each in arrivals)
    falling = [each.delay_s for each in arrivals if each.moment == "falling"]
    assert min(falling) < 0 < max(falling)
    assert min(falling) > -IDLE_S


def test_overhead_is_the_time_after_ready_minus_that_of_an_idle_engine() -> None:
    held = [record(100.0, 9.0, ttft_s=5.3), record(101.0, 5.0)]
    again = [
        [record(200.0, 2.0, ttft_s=0.2), record(200.0, 0.8)],
        [record(210.0, 2.0, ttft_s=0.9), record(210.0, 0.1)],
        [record(220.0, 2.0, ttft_s=0.25), record(220.0, 0.9)],
    ]
    streamed, whole = overheads_s(105.0, held, again)
    assert streamed == pytest.approx(100.0 + 5.3 - 105.0 - 0.25)
    assert whole == pytest.approx(101.0 + 5.0 - 105.0 - 0.8)


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(number) for number in range(1, 21)]
    assert [percentile(values, percent) for percent in (5, 50, 95, 100)] == [1.0, 10.0, 19.0, 20.0]
    assert percentile([7.0], 50) == 7.0
    assert table_row([1.0, 2.0], [-3.0, 40.0], 9, 1) == ["2", "9", "1", "1.00", "2.00", "-3", "40", "40"]
    assert table_row([], [], 0, 0)[3:] == ["nan"] * 5


def test_answers_of_a_ramp_are_counted_by_the_phase_of_their_requests() -> None:
    records = [record(1.0, 3.0, 0.1), record(2.5, 1.0, 0.3), record(2.9, 1.0), record(3.0, 1.0, 0.2, "failed")]
    rows = table_rows(records, [Phase("one", 0.0), Phase("two", 2.0), Phase("end", 3.5)])
    assert rows == [["one", "2", "1", "0", "100", "100", "100"], ["two", "2", "3", "1", "200", "300", "300"]]


def test_all_simulated_cycles_are_counted() -> None:
    workload = visits(30, 5)
    assert workload == visits(30, 5)
    assert workload.requests != visits(30, 6).requests
    arrivals = [each.arrival_s for each in workload.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < workload.duration_s
    outcome = simulate_visits(30, 5)
    assert 10 <= count_cycles(outcome) <= 30
    totals = Totals().plus(outcome).plus(outcome)
    assert totals.num_cycles == 2 * count_cycles(outcome)
    assert (len(totals.ttfts_s), totals.num_lost, totals.num_refused) == (2 * len(workload.requests), 0, 0)


def test_the_autoscalers_decisions_are_read_from_the_output_of_the_command(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "m-0: ready (4.2 s)\n"
        "m: scaled to 0 replicas from 1: no request for 2 s (9.0 s)\n"
        "other: scaled to 7 replicas from 1: (9.1 s)\n"
        "m: scaled to 3 replicas from 0: 9 requests wait (11.0 s)\n"
    )
    up = Up(cast("subprocess.Popen[str]", None), log)
    assert up.scalings("m") == [(1, 0), (0, 3)]


class _Readyz(BaseHTTPRequestHandler):
    status = 200
    ready_s = 0.0
    pauses_s: ClassVar[list[float]] = []
    """The pauses of the next answers, after the server has read its clock."""

    def do_GET(self) -> None:
        body = json.dumps({"phase": "ready", "phase_s": time.monotonic() - self.ready_s}).encode()
        time.sleep(self.pauses_s.pop() if self.pauses_s else 0.0)
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def readyz() -> Iterator[type[_Readyz]]:
    handler = type("Handler", (_Readyz,), {"ready_s": time.monotonic() - 12.5, "pauses_s": [3.0]})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    handler.port = server.server_port  # type: ignore[attr-defined]
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_the_time_of_readiness_is_derived_from_the_fastest_answer(readyz: Any) -> None:
    replica = Replica("m-0", 1, readyz.port)
    assert replica.ready_since_s() == pytest.approx(readyz.ready_s, abs=1.0)
    readyz.status = 503
    assert replica.ready_since_s() is None
