"""The worker's side of the protocol: one JSON line in, one out. It runs under every peer's own interpreter.

Only the standard library is imported here. Stdout is reserved for the protocol: whatever an engine prints goes to
stderr, which the session keeps in a log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Jobs = list[tuple[list[int], int]]
"""Prompt token ids and the exact number of output tokens, of requests that arrive at once."""
Tokens = list[list[int]]
Generate = Callable[[Jobs], Tokens]


def serve(load: Callable[[], tuple[Generate, dict[str, Any]]]) -> None:
    """Serve until stdin ends. `load` returns the function that generates, and facts about the engine."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    generate, about = load()
    answer({"about": about})
    for line in sys.stdin:
        jobs: Jobs = [(ids, num) for ids, num in json.loads(line)["jobs"]]
        start = time.perf_counter()
        tokens = generate(jobs)
        answer({"seconds": time.perf_counter() - start, "num_tokens": [len(each) for each in tokens]})
