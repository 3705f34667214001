"""The latest report of a pod in routing's form; `brain.placement.pod_reports` makes it from an engine's frame."""

from __future__ import annotations

from typing import NamedTuple

from pagemill_gateway.routing.step_time_snapshot import StepTimeSnapshot


class PodReport(NamedTuple):
    """The parts of a pod's latest report that routing needs."""

    block_size: int
    max_step_tokens: int
    """The token budget of a step; 0 if unknown."""
    max_num_seqs: int
    """The number of sequence slots; 0 if unknown."""
    num_running: int
    num_waiting: int
    num_tokens_running: int
    """The context tokens of running requests."""
    num_tokens_waiting: int
    """The prompt tokens that are not computed yet."""
    num_blocks_total: int
    num_blocks_available: int
    """Blocks that are free or evictable."""
    num_blocks_active: int
    step_time: StepTimeSnapshot | None
    """`None` if the pod has reported no step-time model."""
    num_low_priority: int = 0
    """Running and waiting low-priority requests, which leave their sequence slots to others."""
