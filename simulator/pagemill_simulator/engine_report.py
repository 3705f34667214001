"""The report of an engine simulation: latencies as users see them, and the engine's work."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Percentiles(msgspec.Struct, frozen=True):
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Return nearest-rank percentiles; all zero without values."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        return cls(*(ordered[max(0, -(-len(ordered) * percent // 100) - 1)] for percent in (50, 90, 99, 100)))


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    num_requests: int
    num_finished: int
    num_refused: int
    """Refused requests: too large for this configuration, or more than may wait."""
    refusals: dict[str, int]
    """Number of refusals by error code."""
    ttft_s: Percentiles
    """Time from arrival to the first token."""
    tpot_ms: Percentiles
    """Mean time between the tokens of a request."""
    e2e_s: Percentiles
    num_prompt_tokens: int
    """Tokens of finished requests."""
    num_output_tokens: int
    num_steps: int
    num_preemptions: int
    duration_s: float
    """Virtual time from the first arrival to the last token."""
    busy_share: float
    """Share of the duration in which a step was running."""
    kv_waste_mean: float
    """Mean over steps of allocated minus used slots, divided by allocated slots."""
    kv_waste_max: float

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s if self.duration_s else 0.0
