"""A server with a real model that has answered requests and is idle uses less than 1 % of a core."""

from __future__ import annotations

import time
from typing import Any

import httpx2 as httpx
import psutil

WATCHED_S = 2.0
MOST_TRIES = 10


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def test_an_idle_server_uses_no_cpu(model_server: Any) -> None:
    """The limit includes the runner, OpenMP's threads and the HTTP process; a busy wait would use a whole core."""
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "One two three", "max_tokens": 8, "temperature": 0}
    assert httpx.post(f"{model_server.url}/v1/completions", json=body, timeout=60).status_code == 200
    server = psutil.Process(model_server.process.pid)
    processes = [server, *server.children(recursive=True)]
    assert any("pagemill_engine.loop.process" in process.cmdline() for process in processes)
    # The lowest of some measurements counts, because the end of an answer, the clock's resolution of 10 ms, and other
    # processes that use the same caches add to it.
    shares: list[float] = []
    while len(shares) < MOST_TRIES and min(shares, default=1.0) >= 0.01:
        before_s, started_s = cpu_s(processes), time.monotonic()
        time.sleep(WATCHED_S)
        shares.append((cpu_s(processes) - before_s) / (time.monotonic() - started_s))
    assert min(shares) < 0.01, shares
