"""What a run of a simulated fleet leaves behind: what became of every request, and of every pod."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

Ending = Literal["served", "refused", "lost"]
"""`refused`: turned away with an error and a `Retry-After`; `lost`: accepted and never answered to its end."""


class Served(NamedTuple):
    """One request, in the order of arrival."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ending: Ending
    ttft_ms: float | None
    """From arrival at the gateway to the first token there; None: it had none."""
    tpot_ms: float | None
    """Mean between the tokens of its answer; None: it had fewer than two."""


class FleetPoint(NamedTuple):
    """From this instant until the next point."""

    at_s: float
    wanted: int
    starting: int
    ready: int
    draining: int
    num_in_system: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    workload: str
    requests: Sequence[Served]
    timeline: Sequence[FleetPoint]
    """On every change of the pods, and every few seconds between."""
    pod_seconds: float
    """From the moment each pod has its place (GPU) to the moment it gives it back: loading and draining cost too."""
    duration_s: float
    """Virtual, to the end of the traffic and the last token."""
    wall_s: float
    """What the run took; the only number that differs between two runs."""
    num_scale_ups: int
    num_scale_downs: int
    num_flaps: int
    """Changes that were reversed within five minutes."""
    is_exact: bool
    """Every step of every engine was scheduled by the real scheduler; else fast-forward."""
    num_lines: int = 0
    """Of a batch, that were answered before the last live request was."""
    num_line_tokens: int = 0
    """Of their answers."""
