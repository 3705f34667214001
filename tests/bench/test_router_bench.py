"""The comparison with other routers: its pods, its load, valid runs, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from peers.process import PeerFailed
from peers.results import Problem, Results, Sample
from processes import tree_cpu_s
from routers import stage
from routers.catalogue import DIRECT, OURS, SMG, Router, Site, Start, routers, start_pagemill, with_cores
from routers.ladder import Size, climb, judge
from routers.stage import Cores, Scene
from routers.table import added, best, by_rate, cpu_ms, held, markdown
from waiting import WAIT_LIMIT_S

ANSWER_S = 0.3
SCENE = Scene(num_pods=3, max_streams=50, num_tokens=4, step_ms=5.0, num_prompt_tokens=60)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cores:
    monkeypatch.setattr(stage, "FOLDER", tmp_path)
    return Cores(0, [0])


@pytest.mark.parametrize(
    ("num_usable", "wanted", "found"),
    [
        (2, 1, Cores(0, [1])),
        (2, 2, Cores(0, [1], (1,), 1)),
        (2, 4, Cores(0, [1], (1,), 3)),
        (4, 2, Cores(0, [2, 3], (1,))),
    ],
)
def test_a_router_of_several_workers_shares_a_core_only_if_there_are_too_few(
    monkeypatch: pytest.MonkeyPatch, num_usable: int, wanted: int, found: Cores
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_usable)))
    assert stage.cores(wanted) == found


def test_ours_gets_workers_and_smg_threads(tmp_path: Path) -> None:
    known = routers()
    ours, smg = with_cores(known[OURS], 2), with_cores(known[SMG], 2)
    assert (ours.name, ours.num_cores, smg.name, smg.num_cores) == ("pagemill, 2 workers", 2, "smg, 2 threads", 2)
    start = ours.start(Site([1], tmp_path, 10))
    assert json.loads(Path(start.argv[-1]).read_text())["workers"] == 2
    with pytest.raises(ValueError, match="nginx"):
        with_cores(known["nginx"], 2)


def values(**changes: Any) -> dict[str, Any]:
    """Return the values of a run that kept its rate."""
    usual = {
        "num_sent": 100,
        "num_done": 100,
        "sent_s": 5.0,
        "whole_s": 5.3,
        "ttft_ms": {"p50": 1.0, "p99": 4.0},
        "lag_ms": {"p99": 1.0},
        "load_share": 0.5,
        "cpu_ms": 1.0,
        "lagged": False,
        "held": True,
    }
    return {**usual, **changes}


def results(*samples: tuple[str, float, dict[str, Any]], problems: tuple[Problem, ...] = ()) -> Results:
    rows = [Sample(name, f"{rate:g}", 0, each) for name, rate, each in samples]
    return Results({"cpu": "a", "cores": 2}, False, rows, list(problems))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, (True, True)),
        ({"lag_ms": {"p99": 9.0}}, (False, False)),
        ({"load_share": 0.99}, (False, False)),
        ({"num_done": 99}, (True, False)),
        ({"num_done": 0, "ttft_ms": {}}, (True, False)),
        ({"ttft_ms": {"p50": 1.0, "p99": 101.0}}, (True, False)),
        ({"whole_s": 6.0}, (True, False)),
    ],
)
def test_a_run_is_valid_if_the_load_kept_its_rate_and_held_if_answers_came_in_time(
    changes: dict[str, Any], verdict: tuple[bool, bool]
) -> None:
    assert judge(values(**changes), ANSWER_S) == verdict


def test_the_added_time_is_relative_to_the_direct_way_at_the_same_rate() -> None:
    slow = values(ttft_ms={"p50": 3.5, "p99": 9.0})
    measured = results((DIRECT, 100, values()), (DIRECT, 200, values()), ("r", 100, slow))
    assert added(measured, "r", 100) == {"p50": 2.5, "p99": 5.0}
    assert added(measured, "r", 200) == {}


def test_the_highest_rate_names_whether_router_or_load_ended_the_ladder() -> None:
    lost, lagged = values(held=False), values(held=False, lagged=True)
    assert held(results(("r", 50, values()), ("r", 100, values()), ("r", 200, lost)), "r") == "100"
    assert held(results(("r", 50, values()), ("r", 100, lagged)), "r") == "50+"
    assert held(results(("r", 50, values())), "r") == "50+"
    assert held(results(("r", 50, lost)), "r") == "none"


def test_cpu_is_that_of_the_highest_held_rate() -> None:
    measured = results(("r", 50, values(cpu_ms=3.0)), ("r", 100, values(cpu_ms=1.5)), ("r", 200, values(held=False)))
    assert cpu_ms(measured, "r") == 1.5


def test_of_several_rounds_the_median_is_used() -> None:
    rounds = [values(cpu_ms=cpu) for cpu in (9.0, 1.0, 2.0)]
    measured = results(*(("r", 50, each) for each in rounds), ("r", 50, values(cpu_ms=0.1, held=False)))
    assert best(measured, "r", 50)["cpu_ms"] == 2.0


def test_the_table_has_a_row_for_each_router_and_the_cause_of_each_failure() -> None:
    problem = Problem("gone", "install", "not installable")
    measured = results((DIRECT, 100, values()), (OURS, 100, values(cpu_ms=0.8)), problems=(problem,))
    text = markdown(measured, [DIRECT, OURS, "gone"], [100.0])
    rows = {line.split(" | ")[0].strip("| *"): line for line in text.splitlines() if line.startswith("|")}
    assert "| 0.8 |" in rows[OURS]
    assert "0.00 / 0.00" in rows[OURS]
    assert "gone" not in rows
    assert "- gone: not installable" in text


def test_cpu_is_counted_over_the_process_tree() -> None:
    """The sum includes a child that has worked for a while, and not its wait."""
    work = "import time; start = time.process_time()\nwhile time.process_time() - start < 0.3: pass"
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}]); print('done', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        assert tree_cpu_s(process.pid) >= 0.3
        process.communicate("\n")


def test_every_router_knows_every_pod(tmp_path: Path) -> None:
    pods = [18001, 18002, 18003]
    for router in routers().values():
        start = router.start(Site(pods, tmp_path / router.name, 100))
        written = "".join(path.read_text() for path in (tmp_path / router.name).glob("*"))
        assert all(f"127.0.0.1:{pod}" in " ".join(start.argv) + written for pod in pods), router.name
        assert start.port not in pods


def test_a_gateway_for_more_streams_than_usual_accepts_them(tmp_path: Path) -> None:
    start_pagemill(Site([18001], tmp_path, 7000))
    assert json.loads((tmp_path / "gateway.json").read_text())["max_requests"] == 7000


@pytest.mark.slow
@pytest.mark.model
def test_the_pods_answer_directly_and_through_the_gateway(cores: Cores) -> None:
    """Every answer is complete, and the gateway knows the pods' caches."""
    with stage.stage(SCENE, cores) as around:
        direct = around.load(around.ports, 200.0, num_requests=30)
        assert (direct["num_done"], direct["causes"]) == (30, {})
        with stage.started(routers()[OURS], around) as running:
            reported = around.load(running.ports, 100.0, num_requests=30)
            assert (reported["num_done"], reported["causes"]) == (30, {})
            assert 0 < reported["ttft_ms"]["p50"] <= reported["e2e_ms"]["p50"]
            assert running.cpu_s() > 0
    prompts = json.loads(around.bodies.read_text())
    assert len(set(prompts)) == len(prompts)


@contextmanager
def canned(status: int, body: bytes) -> Iterator[Router]:
    """Run a router that always gives the same answer, in a thread of this process."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    process = Start([sys.executable, "-c", "input()"], server.server_port)
    yield Router("canned", "", lambda _uv: None, lambda _site: process)
    server.shutdown()
    thread.join(WAIT_LIMIT_S)
    server.server_close()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("status", "body", "cause"),
    [(500, b"no pod", "HTTP 500: no pod"), (200, b"data: {}\n\ndata: [DONE]\n\n", "incomplete")],
)
def test_a_router_with_wrong_answers_is_not_measured(
    cores: Cores, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, cause: str
) -> None:
    monkeypatch.setattr(stage, "FIRST_ANSWER_TIMEOUT_S", 0.1)
    size = Size(1, (20,), seconds=0.2, num_prompt_tokens=60)
    with canned(status, body) as router, pytest.raises(PeerFailed, match=cause):
        list(climb(router, size, cores))


def test_each_rate_has_a_row_with_the_figures_of_every_router() -> None:
    slow = values(cpu_ms=3.0, ttft_ms={"p50": 3.0, "p99": 9.0})
    measured = results(
        (DIRECT, 250, values()), (OURS, 250, slow), (OURS, 400, values(held=False)), ("smg", 250, values())
    )
    header, _, *rows = by_rate(measured, [DIRECT, OURS, "smg"]).splitlines()
    assert header == "| requests/s | pagemill: CPU ms, added p50 / p99 ms | smg: CPU ms, added p50 / p99 ms |"
    assert rows == ["| 250 | 3.00, 2.00 / 5.00 | 1.00, 0.00 / 0.00 |", "| 400 | not held |  |"]
