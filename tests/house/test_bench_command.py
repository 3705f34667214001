"""`pagemill bench` with a canned server: its requests, its report, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_LIMIT_S

from pagemill.bench.samples import percentiles

COMMAND = [sys.executable, "-m", "pagemill", "bench"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=WAIT_LIMIT_S)


@pytest.fixture
def answers(canned_server: Any, answer_of: Any) -> Any:
    """Set the server's answers to requests; two before them say how long words are."""

    def give(*each: Any) -> None:
        canned_server.answers = [answer_of("a"), answer_of("a"), *each]

    return give


def sent(canned_server: Any) -> list[dict[str, Any]]:
    return canned_server.requests[2:]


def test_the_last_line_is_json_and_counts_every_request(canned_server: Any, answers: Any, answer_of: Any) -> None:
    answers(*(answer_of("a", "b", "c") for _ in range(10)))
    done = bench("--url", canned_server.url, "--requests", "10", "--concurrency", "3", "--prompt-tokens", "5")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["requests"], report["failed"], report["unfinished"]) == (10, 0, 0)
    assert report["completion_tokens"] == 30
    assert set(report["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99"}
    prompts = [body["messages"][0]["content"] for body in sent(canned_server)]
    assert len(set(prompts)) == 10, "prompts must differ, so that a prefix cache cannot answer them"
    assert all(len(prompt.split()) == 5 for prompt in prompts)


@pytest.mark.parametrize("option", ["-o", "--format"])
def test_with_json_nothing_else_is_printed(canned_server: Any, answers: Any, answer_of: Any, option: str) -> None:
    answers(answer_of("a", "b"))
    done = bench("--url", canned_server.url, "--requests", "1", option, "json")
    assert json.loads(done.stdout)["requests"] == 1


def test_an_open_loop_also_sends_every_request(canned_server: Any, answers: Any, answer_of: Any) -> None:
    answers(*(answer_of("a", "b") for _ in range(5)))
    done = bench("--url", canned_server.url, "--requests", "5", "--rate", "200")
    assert json.loads(done.stdout.splitlines()[-1])["requests"] == 5, done.stderr


def test_turns_have_everything_before_and_prefixes_are_shared(canned_server: Any, answers: Any, answer_of: Any) -> None:
    answers(*(answer_of("an", "swer") for _ in range(6)))
    lengths = ("--turns", "3", "--prefix-groups", "1", "--prefix-tokens", "4")
    done = bench("--url", canned_server.url, "--requests", "6", "--concurrency", "1", *lengths)
    assert done.returncode == 0, done.stderr
    talks = [body["messages"] for body in sent(canned_server)]
    assert [len(talk) for talk in talks] == [2, 4, 6, 2, 4, 6]
    assert talks[2][:4] == talks[1]
    assert talks[2][4] == {"role": "assistant", "content": "answer"}
    assert talks[0][0] == talks[3][0]
    assert talks[0][0]["role"] == "system"
    assert talks[0][1] != talks[3][1]


def test_the_bench_stops_after_max_seconds_although_requests_run(
    canned_server: Any, answers: Any, answer_of: Any
) -> None:
    answers(answer_of("a", "b"), ["a", None])
    done = bench("--url", canned_server.url, "--requests", "2", "--concurrency", "1", "--max-seconds", "1")
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["requests"], report["unfinished"]) == (1, 1)
    assert "stopped after 1 s (--max-seconds)" in done.stderr
    assert canned_server.left.wait(WAIT_LIMIT_S)


def test_failures_are_counted_and_fail_the_command(canned_server: Any, answers: Any, answer_of: Any) -> None:
    answers(answer_of("a", "b"), [{"error": {"message": "Overloaded."}}])
    done = bench("--url", canned_server.url, "--requests", "2", "--concurrency", "1")
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == 1
    assert "Overloaded." in done.stderr


def test_a_server_that_refuses_is_quoted(canned_server: Any) -> None:
    canned_server.refusal = (401, "No key.")
    done = bench("--url", canned_server.url, "--model", "m")
    assert done.returncode == 1
    assert "The server refused (401): No key. Pass the API key with --api-key" in done.stderr


def test_a_saved_result_is_compared_and_drawn(canned_server: Any, answers: Any, answer_of: Any, tmp_path: Path) -> None:
    """Two equal loads of one server show no difference."""
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for file in files:
        answers(*(answer_of(*"abcdefgh") for _ in range(12)))
        done = bench(
            "--url", canned_server.url, "--requests", "12", "--save", str(file), "--plot", str(tmp_path / "plot.svg")
        )
        assert done.returncode == 0, done.stderr
        assert "Shares of latencies" in done.stdout
    assert (tmp_path / "plot.svg").read_text().startswith("<svg xmlns=")
    done = bench("--compare", *map(str, files))
    found = json.loads(done.stdout.splitlines()[-1])["8 clients"]
    assert {"output tokens/s", "TTFT p50, ms", "E2E p99, ms"} <= set(found)
    assert all(each["low"] <= each["high"] for each in found.values())


def test_other_machines_are_loaded_only_with_an_option() -> None:
    done = bench("--url", "http://192.0.2.1:8080")
    assert done.returncode == 1
    assert "--allow-remote" in done.stderr


def test_percentiles_are_nearest_rank() -> None:
    assert percentiles([n / 1000 for n in range(1, 101)]) == {
        "mean": 50.5,
        "p50": 50.0,
        "p90": 90.0,
        "p95": 95.0,
        "p99": 99.0,
    }
    assert percentiles([]) == {}
    assert set(percentiles([0.5]).values()) == {500.0}
