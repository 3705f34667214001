"""The capacity of one replica, as gateways and the operator know it from the engines' reports.

`prediction` computes latencies from it; `load` has the reports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pagemill_protocol.report.cache_kinds import ONE_KIND, CacheKind, mean_bytes, needed_bytes
from pagemill_protocol.report.load import EnginesLoad
from pagemill_protocol.report.state import StepTimeParams

ALIKE = 1.25
"""Replicas whose step times differ by at most this factor count as equal: they may have learned from other steps."""


class Shape(msgspec.Struct, frozen=True):
    """The capacity of one replica; it stays valid while there is none."""

    num_bytes: int
    """The bytes of its KV cache. Without `kinds` a block is one."""
    block_size: int
    max_num_seqs: int = 0
    """0: not reported."""
    max_step_tokens: int = 0
    step_time: StepTimeParams = StepTimeParams()
    slowness: tuple[float, ...] = ()
    """Step times of the known replicas as multiples of those of `step_time`, in rising order; empty: all are alike."""
    kinds: tuple[CacheKind, ...] = ()
    """The cache kinds of its model."""

    @property
    def num_blocks(self) -> int:
        """The blocks of all layers that fit in its KV cache."""
        return self.num_bytes // (sum(kind.block_bytes for kind in self.kinds) or 1)

    @property
    def num_tokens(self) -> int:
        """The tokens that fit in its KV cache, if all layers keep all of them."""
        return self.num_blocks * self.block_size

    def bytes_of(self, num_tokens: float) -> float:
        """Return the bytes that a sequence of so many tokens holds on average."""
        return mean_bytes(self.kinds or ONE_KIND, num_tokens, self.block_size)

    def bytes_to_hold(self, num_tokens: float, num_sequences: int) -> int:
        """Return the bytes that so many waiting tokens of so many sequences will need."""
        num_blocks, longest = math.ceil(num_tokens / self.block_size), math.ceil(num_tokens)
        return needed_bytes(self.kinds or ONE_KIND, num_blocks, max(1, num_sequences), longest, self.block_size)


def shape_of(engines: EnginesLoad) -> Shape | None:
    """Return the capacity of one replica; None where no engine reports its size."""
    if engines.truth == "unknown" or engines.num_reporting <= 0 or engines.num_kv_bytes_total <= 0:
        return None
    return Shape(
        num_bytes=max(1, engines.num_kv_bytes_total // engines.num_reporting),
        block_size=max(1, engines.block_size),
        max_num_seqs=max(0, engines.max_num_seqs),
        max_step_tokens=max(0, engines.max_step_tokens),
        step_time=engines.step_time,
        slowness=_slowness(engines.step_time_ratios),
        kinds=engines.kinds,
    )


def _slowness(ratios: Sequence[float]) -> tuple[float, ...]:
    """Return the ratios in rising order, or none where all replicas are alike."""
    known = sorted(ratio for ratio in ratios if 0 < ratio < math.inf)
    if not known or known[-1] <= ALIKE * known[0]:
        return ()
    return tuple(known)
