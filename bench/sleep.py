"""Measures the memory that sleep frees and the time of waking, compared with a cold start of the embedded model.

The KV cache is filled with prompts first, as in an engine that has served for a while. The memory is that of both
processes of the engine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from processes import stop, tree_memory
from report import emit, median
from startup import Engine

from pagemill_servers.secrets.token_file import read_generated_token

PROMPT_TOKENS = 1900
TIMEOUT_S = 600.0


def post(url: str, body: dict[str, Any] | None = None, token: str = "") -> dict[str, Any]:
    data = json.dumps(body or {}).encode()
    guard = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **guard})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        answer: dict[str, Any] = json.loads(response.read())
        return answer


def fill(engine: Engine, num_tokens: int) -> None:
    """Send prompts that share no prefix, so that their blocks stay in the cache."""
    url = f"http://127.0.0.1:{engine.port}/v1/completions"
    for number in range(max(1, num_tokens // PROMPT_TOKENS)):
        prompt = [100 + (number * 97 + index * 7) % 20_000 for index in range(PROMPT_TOKENS)]
        post(url, {"model": "smollm2", "prompt": prompt, "max_tokens": 1})


def timed_ms(url: str, token: str) -> float:
    started_s = time.perf_counter()
    post(url, token=token)
    return (time.perf_counter() - started_s) * 1000


def measure(folder: Path, num_tokens: int) -> dict[str, float]:
    engine = Engine(folder)
    try:
        ready_s = engine.wait_ready()
        fill(engine, num_tokens)
        control_url = f"http://127.0.0.1:{engine.control_port}"
        token = read_generated_token(control_url)
        awake = tree_memory(engine.process.pid)
        sleep_ms = timed_ms(f"{control_url}/sleep", token)
        asleep = tree_memory(engine.process.pid)
        wake_ms = timed_ms(f"{control_url}/wake_up", token)
        first_ms = engine.first_token_ms()
        after = tree_memory(engine.process.pid)
    finally:
        stop(engine.process)
    return {
        "cold_start_ms": ready_s * 1000,
        "sleep_ms": sleep_ms,
        "wake_ms": wake_ms,
        "first_token_after_waking_ms": first_ms,
        "rss_awake_mib": awake.rss_mib,
        "rss_asleep_mib": asleep.rss_mib,
        "rss_after_waking_mib": after.rss_mib,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="number of runs; the median counts")
    parser.add_argument("--tokens", type=int, default=7600, help="number of tokens with which the KV cache is filled")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [measure(Path(folder), args.tokens) for _ in range(args.runs)]
    result = {key: median([run[key] for run in runs]) for key in runs[0]}
    rows = [
        [key, value, f"{min(r[key] for r in runs):,.1f}..{max(r[key] for r in runs):,.1f}"]
        for key, value in result.items()
    ]
    emit("sleep", ["one engine", "median", "min..max"], rows, result)


if __name__ == "__main__":
    main()
