"""What a pod said of itself, in routing's words; `brain.placement.pod_reports` makes it from an engine's frame."""

from __future__ import annotations

from typing import NamedTuple

from pagemill_gateway.routing.step_time_snapshot import StepTimeSnapshot


class PodReport(NamedTuple):
    """What a pod last said of itself, as far as routing needs it."""

    block_size: int
    max_step_tokens: int
    """Budget of one step; 0: not told."""
    max_num_seqs: int
    """Requests that may run at once; 0: not told."""
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
    """`None`: it has not told how fast it is."""
