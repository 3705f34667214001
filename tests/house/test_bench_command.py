"""`pagemill bench` with a canned server: its requests, its report, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from waiting import WAIT_LIMIT_S

from pagemill.commands.bench import percentiles

COMMAND = [sys.executable, "-m", "pagemill", "bench"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_the_last_line_is_json_and_counts_every_request(canned_server: Any, answer_of: Any) -> None:
    canned_server.answers = [answer_of("a", "b", "c") for _ in range(10)]
    done = bench("--url", canned_server.url, "--requests", "10", "--concurrency", "3", "--prompt-words", "5")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["requests"], report["failed"], report["unfinished"]) == (10, 0, 0)
    assert report["completion_tokens"] == 30
    assert set(report["ttft_ms"]) == {"p50", "p90", "p99"}
    prompts = [body["messages"][0]["content"] for body in canned_server.requests]
    assert len(set(prompts)) == 10, "prompts must differ, so that a prefix cache cannot answer them"
    assert all(len(prompt.split()) == 5 for prompt in prompts)


def test_an_open_loop_also_sends_every_request(canned_server: Any, answer_of: Any) -> None:
    canned_server.answers = [answer_of("a", "b") for _ in range(5)]
    done = bench("--url", canned_server.url, "--requests", "5", "--rate", "200")
    assert json.loads(done.stdout.splitlines()[-1])["requests"] == 5, done.stderr


def test_the_bench_stops_after_max_seconds_although_requests_run(canned_server: Any, answer_of: Any) -> None:
    canned_server.answers = [answer_of("a", "b"), ["a", None]]
    done = bench("--url", canned_server.url, "--requests", "2", "--concurrency", "1", "--max-seconds", "1")
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["requests"], report["unfinished"]) == (1, 1)
    assert canned_server.left.wait(WAIT_LIMIT_S)


def test_failures_are_counted_and_fail_the_command(canned_server: Any, answer_of: Any) -> None:
    canned_server.answers = [answer_of("a", "b"), [{"error": {"message": "Overloaded."}}]]
    done = bench("--url", canned_server.url, "--requests", "2", "--concurrency", "1")
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == 1
    assert "Overloaded." in done.stderr


def test_other_machines_are_loaded_only_with_an_option() -> None:
    done = bench("--url", "http://192.0.2.1:8080")
    assert done.returncode == 1
    assert "--allow-remote" in done.stderr


def test_percentiles_are_nearest_rank() -> None:
    assert percentiles([n / 1000 for n in range(1, 101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([]) == {}
    assert percentiles([0.5]) == {"p50": 500.0, "p90": 500.0, "p99": 500.0}
