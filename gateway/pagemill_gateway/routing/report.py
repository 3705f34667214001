"""The latest report of a pod as routing uses it; `brain.placement.pod_reports` makes it from an engine's frame."""

from __future__ import annotations

from typing import NamedTuple

from pagemill_gateway.routing.step_time_snapshot import StepTimeSnapshot


class PodReport(NamedTuple):
    """What a pod last reported, as far as routing needs it."""

    block_size: int
    max_step_tokens: int
    """Token budget of one step; 0: unknown."""
    max_num_seqs: int
    """Sequence slots; 0: unknown."""
    num_running: int
    num_waiting: int
    num_tokens_running: int
    """Context tokens held by running requests."""
    num_tokens_waiting: int
    """Prompt tokens not yet computed."""
    num_blocks_total: int
    num_blocks_available: int
    """Free, or evictable."""
    num_blocks_active: int
    step_time: StepTimeSnapshot | None
    """`None`: it has reported no step-time model."""
    num_giving_way: int = 0
    """Of those running and waiting: they leave their sequence slots to others."""
