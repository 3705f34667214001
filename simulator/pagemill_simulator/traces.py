"""Traffic to simulate: who arrives when, with how many tokens in and out. No text: a trace carries lengths only.

Reads the CSV form of Azure's public LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens; Patel et al.,
Splitwise, ISCA 2024). Where no trace is at hand, `synthetic_trace` draws one of the same shape.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple


class TraceRequest(NamedTuple):
    arrival_s: float
    """Since the trace's first request."""
    num_prompt_tokens: int
    num_output_tokens: int


class TraceError(ValueError):
    """A trace that cannot be read; names file, line and remedy."""


_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure_trace(path: Path, *, limit: int | None = None, speedup: float = 1.0) -> list[TraceRequest]:
    """The first `limit` requests; `speedup` divides the gaps between arrivals. Raises `TraceError`."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(islice(_parse(csv.DictReader(file), path), limit))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    rows.sort(key=lambda row: row[0])
    if not rows:
        raise TraceError(f"{path}: holds no request")
    first = rows[0][0]
    return [
        TraceRequest((moment - first).total_seconds() / speedup, num_prompt_tokens, num_output_tokens)
        for moment, num_prompt_tokens, num_output_tokens in rows
    ]


def synthetic_trace(num_requests: int, *, rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Poisson arrivals with log-normal lengths with the moments of Azure's conversation trace."""
    draw = random.Random(seed)
    arrival_s = 0.0
    requests = []
    for _ in range(num_requests):
        requests.append(
            TraceRequest(
                arrival_s,
                _log_normal(draw, median=760, sigma=0.99, high=14_050),
                _log_normal(draw, median=151, sigma=0.86, high=1_000),
            )
        )
        arrival_s += draw.expovariate(rate_per_s)
    return requests


def _log_normal(draw: random.Random, *, median: int, sigma: float, high: int) -> int:
    return max(1, min(high, round(draw.lognormvariate(math.log(median), sigma))))


def _parse(reader: Iterable[dict[str, str]], path: Path) -> Iterator[tuple[datetime, int, int]]:
    for line, row in enumerate(reader, start=2):
        try:
            moment, num_prompt_tokens, num_output_tokens = (row[column] for column in _COLUMNS)
            yield datetime.fromisoformat(moment.strip()), int(num_prompt_tokens), int(num_output_tokens)
        except (KeyError, ValueError, AttributeError) as error:
            raise TraceError(f"{path}:{line}: expected the columns {', '.join(_COLUMNS)}, got {row}") from error
