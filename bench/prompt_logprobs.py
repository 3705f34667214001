"""Measures the cost of a prompt's log probabilities, by HTTP requests that alternate with plain ones.

Each request generates one token. Every prompt is new, so that nothing is found in the prefix cache. Goal: at most 1.5
times a plain request's time.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import stop
from report import emit, median
from sleep import post
from startup import Engine
from workload import ORDINARY_TOKENS

ASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompt_logprobs 0": {"prompt_logprobs": 0},
    "prompt_logprobs 5": {"prompt_logprobs": 5},
    "prompt_logprobs 20": {"prompt_logprobs": 20},
    "echo, logprobs 1": {"echo": True, "logprobs": 1},
    "echo, logprobs 5": {"echo": True, "logprobs": 5},
    "echo, logprobs 1, max_tokens 0": {"echo": True, "logprobs": 1, "max_tokens": 0},
}


def measure(engine: Engine, num_tokens: int, num_rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each request, by its options."""
    url, draw = f"http://127.0.0.1:{engine.port}/v1/completions", random.Random(1)
    found: dict[str, list[float]] = {name: [] for name in ASKS}
    for number in range(num_rounds + 1):
        for name, fields in ASKS.items():
            prompt = draw.choices(ORDINARY_TOKENS, k=num_tokens)
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
            started_s = time.perf_counter()
            post(url, body)
            if number:  # the first round warms up
                found[name].append((time.perf_counter() - started_s) * 1000)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        try:
            engine.wait_ready()
            found = measure(engine, args.tokens, args.rounds)
        finally:
            stop(engine.process)
    plain = found["plain"]
    ratios = {
        name: median([each / base for each, base in zip(values, plain, strict=True)]) for name, values in found.items()
    }
    rows = [[name, median(values), ratios[name]] for name, values in found.items()]
    emit("prompt_logprobs", [f"prompt of {args.tokens} tokens", "ms", "ratio"], rows, {"ratios": ratios})


if __name__ == "__main__":
    main()
