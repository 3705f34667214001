"""What was measured of each request, and the figures of a run.

`sending` makes the samples; `comparing` reads those of two runs from their files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")


class BenchSample(msgspec.Struct, frozen=True):
    """One answered request; times in seconds."""

    at_s: float
    """When it was sent, since the run's beginning."""
    ttft_s: float
    """Time to first token: from sending to the first event with text."""
    e2e_s: float
    """From sending to the last event with text."""
    gaps_s: list[float]
    """Times between events (ITL)."""
    prompt_tokens: int
    completion_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """The mean time per output token after the first; `None` for an answer of one token."""
        if self.completion_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.completion_tokens - 1)

    @property
    def end_s(self) -> float:
        return self.at_s + self.e2e_s


class BenchRun(msgspec.Struct):
    """A run at one load."""

    samples: list[BenchSample] = msgspec.field(default_factory=list)
    errors: list[str] = msgspec.field(default_factory=list)
    num_started: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the benchmark itself."""

    @property
    def output_tokens_per_s(self) -> float:
        return sum(each.completion_tokens for each in self.samples) / self.wall_s if self.wall_s else 0.0


class LatencyLimits(msgspec.Struct, frozen=True):
    """Limits in seconds that a request must keep to be good; `None`: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def kept(self, sample: BenchSample) -> bool:
        pairs = ((self.ttft, sample.ttft_s), (self.tpot, sample.tpot_s), (self.e2e, sample.e2e_s))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


VALUES: dict[str, Callable[[BenchSample], Sequence[float]]] = {
    "ttft": lambda sample: (sample.ttft_s,),
    "tpot": lambda sample: () if sample.tpot_s is None else (sample.tpot_s,),
    "itl": lambda sample: sample.gaps_s,
    "e2e": lambda sample: (sample.e2e_s,),
}
"""The times of a sample by the name of the latency."""


def figures(run: BenchRun, slo: LatencyLimits) -> dict[str, Any]:
    """Return the figures of a run, times in milliseconds."""
    samples, wall_s = run.samples, run.wall_s or math.nan
    found: dict[str, Any] = {
        "requests": len(samples),
        "failed": len(run.errors),
        "unfinished": run.num_started - len(samples) - len(run.errors),
        "wall_s": round(run.wall_s, 3),
        "prompt_tokens": sum(sample.prompt_tokens for sample in samples),
        "completion_tokens": sum(sample.completion_tokens for sample in samples),
        "output_tokens_per_s": round(run.output_tokens_per_s, 1),
        "requests_per_s": round(len(samples) / wall_s, 3),
        "client_cpu_ms_per_request": round(run.cpu_s * 1000 / max(1, run.num_started), 3),
    }
    if slo != LatencyLimits():
        num_good = sum(slo.kept(sample) for sample in samples)
        found["goodput_requests_per_s"] = round(num_good / wall_s, 3)
        found["good_share"] = round(num_good / max(1, len(samples) + len(run.errors)), 4)
    for name in LATENCIES:
        found[f"{name}_ms"] = percentiles(list(itertools.chain.from_iterable(map(VALUES[name], samples))))
    return found


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the mean and the nearest-rank percentiles in milliseconds; empty if there are no values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    ranks = {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in PERCENTILES}
    return {name: round(value * 1000, 2) for name, value in ({"mean": sum(ordered) / len(ordered)} | ranks).items()}
