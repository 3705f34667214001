"""Summarizes an outcome in a few numbers: latency, share within the SLO, cost, and changes of the replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from pagemill_simulator.fleet.outcome import FleetOutcome, Served

Span = tuple[float, float]
"""Start and end in seconds since the first request could arrive."""


class Quantiles(msgspec.Struct, frozen=True):
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    """None: there was no value."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        """Return the quantiles by nearest rank."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        return cls(*(ordered[max(0, -(-len(ordered) * percent // 100) - 1)] for percent in (50, 95, 99)))


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    num_requests: int
    num_served: int
    num_refused: int
    num_lost: int
    ttft_ms: Quantiles
    """Quantiles over the requests that had a first token."""
    tpot_ms: Quantiles
    slo_attained: float | None
    """Share of all requests that were served within the SLO; None without an SLO or a request."""
    slo_attained_apart: float | None = None
    """The same without the requests that arrived in excluded spans."""
    pod_seconds: float
    duration_s: float
    most_replicas: int
    """Most replicas that were ready at once."""
    num_scale_ups: int
    num_scale_downs: int
    num_flaps: int
    is_exact: bool
    wall_s: float
    num_lines: int = 0
    """Batch lines that were answered; all other fields are about requests."""
    num_line_tokens: int = 0


def figures_of(
    outcome: FleetOutcome,
    *,
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
    apart_s: Sequence[Span] = (),
) -> Figures:
    """Return the figures. `apart_s` are spans of arrivals that no policy can serve in time, as no pod could be
    ready.
    """
    requests = outcome.requests
    endings = Counter(each.ending for each in requests)
    calm = [each for each in requests if not any(start <= each.arrival_s < end for start, end in apart_s)]
    return Figures(
        policy=outcome.policy,
        num_requests=len(requests),
        num_served=endings["served"],
        num_refused=endings["refused"],
        num_lost=endings["lost"],
        ttft_ms=Quantiles.of(each.ttft_ms for each in requests if each.ttft_ms is not None),
        tpot_ms=Quantiles.of(each.tpot_ms for each in requests if each.tpot_ms is not None),
        slo_attained=_attained(requests, slo_ttft_ms, slo_tpot_ms),
        slo_attained_apart=_attained(calm, slo_ttft_ms, slo_tpot_ms),
        pod_seconds=outcome.pod_seconds,
        duration_s=outcome.duration_s,
        most_replicas=max((point.ready for point in outcome.timeline), default=0),
        num_scale_ups=outcome.num_scale_ups,
        num_scale_downs=outcome.num_scale_downs,
        num_flaps=outcome.num_flaps,
        is_exact=outcome.is_exact,
        wall_s=outcome.wall_s,
        num_lines=outcome.num_lines,
        num_line_tokens=outcome.num_line_tokens,
    )


def _attained(requests: Sequence[Served], ttft_ms: float | None, tpot_ms: float | None) -> float | None:
    if not requests or (ttft_ms is None and tpot_ms is None):
        return None
    return sum(is_within_slo(each, ttft_ms, tpot_ms) for each in requests) / len(requests)


def is_within_slo(served: Served, ttft_ms: float | None, tpot_ms: float | None) -> bool:
    """Whether the request was served and each of its times is within its limit; None means no limit."""
    if served.ending != "served" or served.ttft_ms is None:
        return False
    is_prompt = ttft_ms is None or served.ttft_ms <= ttft_ms
    is_steady = tpot_ms is None or served.tpot_ms is None or served.tpot_ms <= tpot_ms
    return is_prompt and is_steady
