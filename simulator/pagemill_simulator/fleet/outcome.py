"""The outcome of a simulated fleet: the end of every request, and the pods over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

Ending = Literal["served", "refused", "lost"]
"""`refused`: rejected with an error and a `Retry-After`; `lost`: accepted and never completely answered."""


class Served(msgspec.Struct, frozen=True, gc=False):
    """One request."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ending: Ending
    ttft_ms: float | None
    """Milliseconds from arrival at the gateway to the first token there; None if there was none."""
    tpot_ms: float | None
    """Mean milliseconds between the tokens of the answer; None with fewer than two."""


class FirstToken(NamedTuple):
    """The first token of a request at the gateway, with what routing had predicted when it chose the engine."""

    num_prompt_tokens: int
    num_cached_tokens: int
    predicted_cached_tokens: int
    prefix_chunk_tokens: int
    """The tolerance of the prediction (`brain.interface.Assignment`)."""
    ttft_ms: float
    """Milliseconds since the request was sent to the engine."""
    predicted_ttft_ms: float | None


class FleetPoint(NamedTuple):
    """The state of the fleet from this instant until the next point."""

    at_s: float
    wanted: int
    starting: int
    ready: int
    draining: int
    num_in_system: int


class FleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    workload: str
    requests: Sequence[Served]
    timeline: Sequence[FleetPoint]
    """A point for every change of the pods, and every few seconds between."""
    pod_seconds: float
    """From each pod's scheduling (GPU) to its release, so that loading and draining cost too."""
    duration_s: float
    """Virtual seconds to the end of the traffic and the last token."""
    wall_s: float
    """Real seconds of the run; the only number that differs between two runs."""
    num_scale_ups: int
    num_scale_downs: int
    num_flaps: int
    """Changes that were reversed within five minutes."""
    is_exact: bool
    """Whether the real scheduler decided every step of every engine, instead of fast-forward."""
    num_lines: int = 0
    """Batch lines that were answered before the last live request was."""
    num_line_tokens: int = 0
    """Tokens of their answers."""
    num_adapter_loads: int = 0
    """Adapter loads of all pods."""
