"""Finds the one rank that computes much slower than the others, for which all of them wait in each step.

Each rank measures the time that its model computes, without waits for other ranks and without sampling, which only
rank 0 does. Ranks hold unequal parts, so times are compared by the values that a rank multiplies, and by its key/value
heads, which decide how long contexts take: a slow rank is slow by both. Rank 0 judges windows of many steps; gateways
pass it on (`StateFrame.slow_rank`), and the operator shows it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from pagemill_execution.decoders.step_model import StepModel, StepTokens, WrappedModel
from pagemill_kernels.arrays import Array
from pagemill_kernels.ranks.group import ComputedTime
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.sharding.shard import num_multiplied
from pagemill_protocol.report.state import SlowRank

logger = logging.getLogger(__name__)

WINDOW_S, WINDOW_STEPS = 10.0, 20
"""The least that ranks are compared over."""
SLOW, NO_LONGER_SLOW = 2.0, 1.5
"""Multiples of the time of the others from which a rank is called slow, and below which it no longer is."""
WINDOWS = 3
"""In so many windows one behind the other, so that one with a hiccup says nothing."""
LEAST_STEP_S = 0.001
"""Less of a step is not the model's products but what each step costs."""


class TimedGroup(Protocol):
    """What measures the time of a rank."""

    @property
    def waited_s(self) -> float: ...

    def add_computed(self, seconds: float, steps: int) -> None: ...


class TimedModel(WrappedModel):
    """A rank's part of a model, which measures how long it computes."""

    def __init__(self, model: StepModel, group: TimedGroup) -> None:
        super().__init__(model)
        self._group = group

    def hidden(self, step: StepTokens, adapters: Any = None) -> Array:
        return self._timed(1, self._model.hidden, step, adapters)

    def logits(self, hidden: Array, adapters: Any = None) -> Array:
        return self._timed(0, self._model.logits, hidden, adapters)

    def _timed(self, steps: int, compute: Callable[[Any, Any], Array], *given: Any) -> Array:
        began_s, waited_s = time.monotonic(), self._group.waited_s
        found = compute(*given)
        seconds = time.monotonic() - began_s - (self._group.waited_s - waited_s)
        self._group.add_computed(seconds, steps)
        return found


class RankWork(NamedTuple):
    """What a rank computes in a step, in units that only compare ranks."""

    num_values: int
    """Values of its matrices that each token is multiplied with."""
    num_kv_heads: int
    """Of all of its layers; 0: it has no attention."""

    @classmethod
    def of(cls, decoder: DecoderSpec) -> RankWork:
        return cls(num_multiplied(decoder), sum(each.num_kv_heads for each in decoder.attentions()))


class RankSpeeds:
    """Judges the sums of all ranks over time."""

    def __init__(
        self, works: Sequence[RankWork], ranks_of_node: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ranks_of_node`: how many consecutive ranks each machine or pod runs."""
        self._works, self._ranks_of_node, self._clock = works, ranks_of_node, clock
        self._measures = [[each.num_values for each in works]]
        heads = [each.num_kv_heads for each in works]
        if all(heads):
            self._measures.append(heads)
        self._began_s = clock()
        self._before = [ComputedTime(0.0, 0)] * len(works)
        self._candidate, self._num_windows = -1, 0
        """The slowest rank of the last windows, and in how many it was slow, or no longer slow if it is named."""
        self.slow: SlowRank | None = None

    def look(self, computed: Sequence[ComputedTime]) -> None:
        """Take the sums of all ranks since their start. Callable at any time."""
        now_s = self._clock()
        if now_s - self._began_s < WINDOW_S:
            return
        window = [
            ComputedTime(now.seconds - then.seconds, now.steps - then.steps)
            for now, then in zip(computed, self._before, strict=True)
        ]
        if min(each.steps for each in window) < WINDOW_STEPS:
            return
        self._began_s, self._before = now_s, list(computed)
        self._judge([each.seconds / each.steps for each in window])

    def _judge(self, step_s: Sequence[float]) -> None:
        """Take the seconds that each rank has computed a step."""
        if self.slow is not None:
            is_over = step_s[self.slow.rank] < NO_LONGER_SLOW * self._expected_s(self.slow.rank, step_s)
            self._num_windows = self._num_windows + 1 if is_over else 0
            if self._num_windows == WINDOWS:
                logger.warning("rank %d is no longer slow", self.slow.rank)
                self.slow, self._num_windows = None, 0
            return
        expected_s = [self._expected_s(rank, step_s) for rank in range(len(step_s))]
        rank = max(range(len(step_s)), key=lambda each: step_s[each] / expected_s[each])
        if step_s[rank] < max(LEAST_STEP_S, SLOW * expected_s[rank]):
            self._num_windows = 0
            return
        self._num_windows = self._num_windows + 1 if rank == self._candidate else 1
        self._candidate = rank
        if self._num_windows == WINDOWS:
            self._num_windows = 0
            ms = 1000 * step_s[rank], 1000 * expected_s[rank]
            self.slow = SlowRank(rank, rank // self._ranks_of_node, *(round(each, 1) for each in ms))
            logger.warning("rank %d computes %.1f ms a step, %.1f ms at the speed of the others", rank, *ms)

    def _expected_s(self, rank: int, step_s: Sequence[float]) -> float:
        """Return what a step of a rank would take at the median speed of the others, by the measure by which it has
        most to do."""
        found = []
        for works in self._measures:
            others = [step_s[other] / works[other] for other in range(len(works)) if other != rank]
            found.append(works[rank] * statistics.median(others))
        return max(found)
