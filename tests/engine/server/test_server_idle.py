"""A server with a real model that has answered and has nothing to do takes less than 1 % of a core."""

from __future__ import annotations

import time
from typing import Any

import httpx2 as httpx
import psutil

WATCHED_S = 6.0


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def test_nothing_spins_while_nothing_is_asked(model_server: Any) -> None:
    """Loop, runner, OpenMP's threads and the HTTP process together; an engine that spins takes a whole core."""
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "One two three", "max_tokens": 8, "temperature": 0}
    assert httpx.post(f"{model_server.url}/v1/completions", json=body, timeout=60).status_code == 200
    server = psutil.Process(model_server.process.pid)
    processes = [server, *server.children(recursive=True)]
    assert any("pagemill_engine.loop.process" in process.cmdline() for process in processes)
    # The quietest of three watches: what ends an answer, and the clock's grain of 10 ms, is none of the idling.
    shares = []
    for _ in range(3):
        before_s, started_s = cpu_s(processes), time.monotonic()
        time.sleep(WATCHED_S / 3)
        shares.append((cpu_s(processes) - before_s) / (time.monotonic() - started_s))
    assert min(shares) < 0.01, shares
