"""The latest report of a pod in routing's form; `brain.endpoints.pod_reports` makes it from an engine's frame."""

from __future__ import annotations

import msgspec

from pagemill_protocol.report.cache_kinds import CacheKind
from pagemill_protocol.report.state import EngineLoad
from pagemill_routing.policies.step_time_snapshot import StepTimeSnapshot


class PodReport(msgspec.Struct, frozen=True, gc=False):
    """A pod's load, its limits, and the durations of its steps under that load, computed once per report."""

    load: EngineLoad
    block_size: int
    max_step_tokens: int
    """The token budget of a step; 0 if unknown."""
    max_num_seqs: int
    """The number of sequence slots; 0 if unknown."""
    step_time: StepTimeSnapshot | None
    """`None` if the pod has reported no step-time model."""
    block_bytes: int = 1
    """The bytes of a block of the cache kinds that keep all blocks."""
    sparse_kinds: tuple[CacheKind, ...] = ()
    """The other cache kinds."""
