"""Measures the time from process start to readiness and first token, and the memory of one and of two replicas.

Starts `python -m pagemill_engine.server` like the operator and sends requests like a client. Two replicas share what
the kernel can share (mapped weights, libraries), which the proportional set size shows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from processes import stop, tree_memory
from report import emit, median
from workload import MODEL

from pagemill.client import ChatClient
from pagemill_operator.backends.local.ports import free_port

READY_TIMEOUT_S = 180.0


class Engine:
    """A running engine."""

    def __init__(self, folder: Path) -> None:
        self.port, self.control_port = free_port(), free_port()
        settings = {
            "engine": {"model": MODEL, "served_names": ["smollm2"], "max_model_len": 2048},
            "server": {"port": self.port, "control_port": self.control_port},
        }
        path = folder / f"{self.port}.json"
        path.write_text(json.dumps(settings))
        self.started_s = time.perf_counter()
        argv = [sys.executable, "-m", "pagemill_engine.server", "--settings", str(path)]
        self.process = subprocess.Popen(argv, text=True, stdout=subprocess.DEVNULL)

    def wait_ready(self) -> float:
        """Wait for a successful `/readyz`; return the seconds since the start."""
        while not self._is_ready():
            if self.process.poll() is not None:
                raise SystemExit(f"the engine ended with exit code {self.process.returncode}")
            if time.perf_counter() - self.started_s > READY_TIMEOUT_S:
                raise SystemExit(f"the engine was not ready after {READY_TIMEOUT_S:.0f} s")
            time.sleep(0.02)
        return time.perf_counter() - self.started_s

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.control_port}/readyz", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def first_token_ms(self) -> float:
        """Return the time to the first token of a short chat, as a client sees it."""
        return asyncio.run(_first_token_ms(f"http://127.0.0.1:{self.port}"))


async def _first_token_ms(url: str) -> float:
    async with ChatClient(url) as client:
        start = time.perf_counter()
        messages = [{"role": "user", "content": "What is a page table?"}]
        async for piece in client.stream_chat("smollm2", messages, max_tokens=16, temperature=0):
            if piece.text:
                return (piece.at_s - start) * 1000
    raise SystemExit("the engine answered without any text")


def measure(folder: Path) -> dict[str, float]:
    engines = [Engine(folder)]
    try:
        ready_s = engines[0].wait_ready()
        first_ms = engines[0].first_token_ms()
        one = tree_memory(engines[0].process.pid)
        engines.append(Engine(folder))
        engines[1].wait_ready()
        engines[1].first_token_ms()
        both = [tree_memory(each.process.pid) for each in engines]
    finally:
        for each in engines:
            stop(each.process)
    return {
        "ready_s": ready_s,
        "first_token_ms": first_ms,
        "rss_mib": one.rss_mib,
        "pss_mib": one.pss_mib,
        "pss_of_two_mib": sum(each.pss_mib for each in both),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="number of runs; the median counts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [measure(Path(folder)) for _ in range(args.runs)]
    result = {key: median([run[key] for run in runs]) for key in runs[0]}
    rows = [
        [key, value, f"{min(r[key] for r in runs):,.2f}..{max(r[key] for r in runs):,.2f}"]
        for key, value in result.items()
    ]
    emit("startup", ["one engine", "median", "min..max"], rows, result)


if __name__ == "__main__":
    main()
