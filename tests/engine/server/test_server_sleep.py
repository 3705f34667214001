"""Sleep over HTTP with real processes: no request is cut off, memory is released, and answers stay the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from waiting import WAIT_LIMIT_S

from pagemill_protocol.frames import StateDecoder
from pagemill_protocol.report.state import StateFrame

MODEL = "SmolLM2-135M-Instruct"
SHORT = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
LONG_PROMPT = {"model": MODEL, "prompt": list(range(100, 400)), "max_tokens": 2}
SLOW = {"step_time": {"knots_tokens": [1, 512], "knot_ms": [20.0, 20.0]}}


class Frames:
    """A reader of the state stream."""

    def __init__(self, server: Any) -> None:
        self._news = threading.Condition()
        self._frames: list[StateFrame] = []
        self.prefixes: set[bytes] = set()
        self._closed = False
        self._server = server
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for(self, accepts: Callable[[StateFrame], bool]) -> StateFrame:
        with self._news:
            assert self._news.wait_for(lambda: any(map(accepts, self._frames)), WAIT_LIMIT_S)
            return next(filter(accepts, reversed(self._frames)))

    def close(self) -> None:
        self._closed = True
        self._thread.join(WAIT_LIMIT_S)

    def _run(self) -> None:
        decoder = StateDecoder()
        url = f"{self._server.control_url}/internal/state"
        with httpx.stream("GET", url, headers=self._server.auth, timeout=WAIT_LIMIT_S) as response:
            for data in response.iter_bytes():
                for frame in decoder.feed(data):
                    with self._news:
                        self.prefixes = (set() if frame.snapshot else self.prefixes) | set(frame.prefixes_added)
                        self.prefixes -= set(frame.prefixes_removed)
                        self._frames.append(frame)
                        self._news.notify_all()
                if self._closed:  # the stream sends a frame every second
                    return


@contextmanager
def following(server: Any) -> Iterator[Frames]:
    frames = Frames(server)
    try:
        yield frames
    finally:
        frames.close()


def control(server: Any, path: str, **query: Any) -> Any:
    return httpx.post(f"{server.control_url}/{path}", headers=server.auth, params=query, timeout=60)


def readyz(server: Any) -> tuple[int, str]:
    answer = httpx.get(f"{server.control_url}/readyz", timeout=WAIT_LIMIT_S)
    return answer.status_code, answer.json()["phase"]


def complete(server: Any, body: dict[str, Any]) -> Any:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def text(server: Any, body: dict[str, Any]) -> str:
    answer = complete(server, body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def metric(server: Any, name: str) -> float:
    lines = httpx.get(f"{server.control_url}/metrics", timeout=WAIT_LIMIT_S).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def test_an_idle_engine_sleeps_refuses_requests_and_answers_after_waking(start_server: Callable[..., Any]) -> None:
    server = start_server(engine={"seed": 5})
    server.wait_for("ready")
    with following(server) as frames:
        before = text(server, LONG_PROMPT)
        frames.wait_for(lambda frame: bool(frame.prefixes_added))
        slept = control(server, "sleep", level=1)
        assert (slept.status_code, slept.json()["state"]) == (200, "asleep")
        assert frames.wait_for(lambda frame: frame.sleeping).max_model_len > 0
        frames.wait_for(lambda frame: bool(frame.prefixes_removed))
        assert not frames.prefixes
        assert readyz(server) == (503, "sleeping")
        assert httpx.get(f"{server.control_url}/livez", timeout=WAIT_LIMIT_S).status_code == 200
        refused = complete(server, SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert control(server, "sleep").json()["state"] == "asleep", "a repeated request must not fail"
        assert metric(server, "pagemill_engine_sleeping") == 1
        assert metric(server, "pagemill_engine_ready") == 0

        woken = control(server, "wake_up")
        assert (woken.status_code, woken.json()["state"]) == (200, "awake")
        assert readyz(server) == (200, "ready")
        reported = frames.wait_for(lambda frame: not frame.sleeping and frame.num_wakes == 1)
        assert reported.start_s["wake"] > 0
        assert reported.start_s.keys() >= {"load", "warm", "first_token"}, "the times of the start must stay known"
        assert text(server, LONG_PROMPT) == before
        assert control(server, "wake_up").json()["state"] == "awake", "an engine that is awake must not change"
        assert metric(server, "pagemill_engine_wake_seconds_count") == 1
        assert metric(server, "pagemill_engine_sleeping") == 0
        phases = httpx.get(f"{server.control_url}/metrics", timeout=WAIT_LIMIT_S).text
        assert 'phase="sleeping"' not in phases, "the time of a sleep is no part of the start"


@pytest.mark.slow
def test_running_requests_are_finished_before_the_engine_sleeps(start_server: Callable[..., Any]) -> None:
    server = start_server(engine=SLOW)
    server.wait_for("ready")
    body = {**SHORT, "max_tokens": 250, "stream": True, "ignore_eos": True}  # five seconds for the requests below
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        falling = control(server, "sleep", wait_s=0)
        assert (falling.status_code, falling.json()["state"]) == (202, "falling_asleep")
        assert readyz(server) == (503, "sleeping")
        assert complete(server, SHORT).status_code == 503
        rest = list(lines)
    assert rest[-1] in ("data: [DONE]", "")
    assert not any(line.startswith('data: {"error"') for line in rest)
    assert control(server, "sleep").json()["state"] == "asleep"
    assert control(server, "wake_up").json()["state"] == "awake"
    assert complete(server, SHORT).status_code == 200


def test_waking_cancels_a_pending_sleep(start_server: Callable[..., Any]) -> None:
    server = start_server(engine=SLOW)
    server.wait_for("ready")
    body = {**SHORT, "max_tokens": 500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        falling = control(server, "sleep", wait_s=0)
        assert (falling.status_code, falling.json()["num_requests"]) == (202, 1)
        assert control(server, "wake_up").json()["state"] == "awake"
        assert complete(server, SHORT).status_code == 200
        next(lines)
    assert metric(server, "pagemill_engine_wake_seconds_count") == 0


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("sleep", {"level": 2}, "level"),
        ("sleep", {"wait_s": "soon"}, "wait_s"),
        ("wake_up", {"wait_s": -1}, "wait_s"),
        ("wake_up", {"tags": "weights"}, "tags"),
    ],
)
def test_an_invalid_request_names_the_field(null_server: Any, path: str, query: dict[str, Any], param: str) -> None:
    answer = control(null_server, path, **query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert readyz(null_server)[0] == 200


def test_sleep_requires_the_internal_token(null_server: Any) -> None:
    for method, path in (("POST", "sleep"), ("POST", "wake_up"), ("GET", "is_sleeping")):
        unguarded = httpx.request(method, f"{null_server.control_url}/{path}", timeout=WAIT_LIMIT_S)
        assert unguarded.status_code in (401, 403)
        elsewhere = httpx.request(method, f"{null_server.url}/{path}", headers=null_server.auth, timeout=WAIT_LIMIT_S)
        assert elsewhere.status_code == 404
    answer = httpx.get(f"{null_server.control_url}/is_sleeping", headers=null_server.auth, timeout=WAIT_LIMIT_S)
    assert answer.json()["is_sleeping"] is False


def test_a_sleeping_engine_ends_when_it_is_stopped(start_server: Callable[..., Any]) -> None:
    server = start_server()
    server.wait_for("ready")
    assert control(server, "sleep").status_code == 200
    server.process.terminate()
    assert server.wait_exit() == 0


def _engine_process_of(pid: int) -> psutil.Process:
    """Return the engine process; servers have other children too, some of them for a moment."""
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            if "pagemill_engine.loop.process" in child.cmdline():
                return child
    raise AssertionError(f"the server {pid} has no engine process")


@pytest.mark.slow
def test_the_kv_caches_memory_is_released_and_answers_stay_the_same(start_server: Callable[..., Any]) -> None:
    num_tokens, bytes_per_token = 800, 2 * 30 * 3 * 64 * 4
    engine = {"null_runner": False, "num_kv_blocks": 256, "max_model_len": 1024, "dtype": "float32", "num_threads": 1}
    server = start_server(engine=engine)
    server.wait_for("ready")
    child = _engine_process_of(server.process.pid)
    question = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0.0}
    filling = {"model": MODEL, "prompt": [100 + index % 900 for index in range(num_tokens - 8)], "max_tokens": 4}
    text(server, filling)
    before, rss_before = text(server, question), child.memory_info().rss

    slept = control(server, "sleep").json()
    assert slept["released_bytes"] == 256 * 16 * bytes_per_token
    rss_asleep = child.memory_info().rss
    control(server, "wake_up")
    rss_awake = child.memory_info().rss
    after = text(server, question)

    filled = num_tokens * bytes_per_token
    assert rss_before - rss_asleep > 0.8 * filled, (rss_before, rss_asleep, filled)
    assert rss_asleep <= rss_awake < rss_before, "memory must be used on demand, in pages of up to 2 MiB per layer"
    assert after == before
