"""Clients of a server over HTTP, in several processes: one Python process could not read as fast as a GPU writes.

As a script it is one of these processes: it reads its requests from stdin, says that it is ready, sends them when the
next line arrives, and writes the times of each answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

PROCESSES = 8
LIMIT_S = 240.0


class Streamed(NamedTuple):
    """What the clients saw; times are sorted."""

    seconds: float
    num_tokens: int
    ttft_s: list[float]
    tpot_s: list[float]


def stream(url: str, model: str, jobs: list[tuple[list[int], int]], streams: int) -> Streamed:
    """Send all jobs, `streams` at a time; each process takes its share of both."""
    processes = min(PROCESSES, os.cpu_count() or 1, streams)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(Path(__file__).resolve())]
    clients = [
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(processes)
    ]
    try:
        for index, client in enumerate(clients):
            share = len(range(index, streams, processes))
            work = {"url": url, "model": model, "jobs": jobs[index::processes], "streams": share}
            _say(client, work)
        for client in clients:
            _hear(client)
        begin_s = time.perf_counter()
        for client in clients:
            _say(client, {"go": True})
        answers = [answer for client in clients for answer in _hear(client)["answers"]]
        seconds = time.perf_counter() - begin_s
    finally:
        for client in clients:
            client.kill()
            client.wait()
            for pipe in (client.stdin, client.stdout):
                assert pipe is not None
                pipe.close()
    tpot_s = sorted((e2e_s - ttft_s) / max(1, tokens - 1) for ttft_s, e2e_s, tokens in answers)
    return Streamed(seconds, sum(each[2] for each in answers), sorted(each[0] for each in answers), tpot_s)


def _say(client: subprocess.Popen[str], message: dict[str, object]) -> None:
    assert client.stdin is not None
    client.stdin.write(json.dumps(message) + "\n")
    client.stdin.flush()


def _hear(client: subprocess.Popen[str]) -> dict[str, list[tuple[float, float, int]]]:
    assert client.stdout is not None
    line = client.stdout.readline()
    if not line:
        raise RuntimeError(f"a client ended with {client.wait(LIMIT_S)}")
    found: dict[str, list[tuple[float, float, int]]] = json.loads(line)
    if "error" in found:
        raise RuntimeError(str(found["error"]))
    return found


def serve_one() -> None:
    from peers.http_load import send

    def answer(message: dict[str, object]) -> None:
        print(json.dumps(message), flush=True)

    work = json.loads(sys.stdin.readline())
    answer({"ready": []})
    if not sys.stdin.readline():
        return
    jobs = [(ids, num) for ids, num in work["jobs"]]
    try:
        _, answers = send(work["url"], work["model"], jobs, work["streams"])
    except ExceptionGroup as problems:  # of the clients' tasks
        answer({"error": repr(problems.exceptions[0])[:300]})
        return
    answer({"answers": [(each.ttft_s, each.e2e_s, each.num_tokens) for each in answers]})


if __name__ == "__main__":
    serve_one()
