"""Proposed tokens in virtual time: as many are right as the step times say that decodes sample.

The scheduler verifies them like real ones, for their space, budget and time. Which tokens they are means nothing here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.proposing.base import KnownTokens
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.runners.null import NullRunner
from pagemill_execution.step import StepPlan
from pagemill_protocol.report.state import StepTimeParams

RIGHT, WRONG = 1, 0


class _AcceptingRunner(NullRunner):
    """Samples the proposed tokens that are right."""

    def num_right(self, row: object, proposed: list[int]) -> int:
        return proposed.index(WRONG) if WRONG in proposed else len(proposed)

    def predicted_ms(self, plan: StepPlan) -> float:
        return super().predicted_ms(plan) + (self.step_time.draft_ms if plan.proposals else 0.0)


class _ExpectedTokens:
    """`proposing.base.Method` and its proposers: numbers are drawn with the means of the step times."""

    agreement = 0

    def __init__(self, step_time: StepTimeParams, seed: int) -> None:
        self._right = max(0.0, step_time.tokens_per_decode - 1)
        self._proposed = max(self._right, step_time.computed_per_decode - 1)
        self._draw = random.Random(seed)

    @property
    def most(self) -> int:
        return math.ceil(self._proposed)

    def begin(self, sequence: KnownTokens) -> _ExpectedTokens:
        return self

    def end(self, sequence: KnownTokens) -> None:
        pass

    def propose(self, most: int) -> list[int]:
        drawn = self._draw.random()
        num_right, num = (math.floor(each + drawn) for each in (self._right, self._proposed))
        return ([RIGHT] * num_right + [WRONG] * (num - num_right))[:most]


def simulated_core(
    config: EngineConfig,
    clock: Callable[[], float],
    advance: Callable[[float], None],
    *,
    serves_adapters: bool = False,
) -> EngineCore:
    """Return the core of an engine whose runner waits by `advance` as long as the step times of `config` say."""
    off = SpeculationConfig(method="off")
    settings = msgspec.structs.replace(config, null_runner=True, seed=config.seed or 0, speculative=off)
    step_time, kind, proposals = settings.step_time, NullRunner, None
    if step_time is not None and step_time.tokens_per_decode > 1:
        # A step waits for the tokens of the one before, since some are proposed behind them. In stages rows wait alone.
        settings = msgspec.structs.replace(settings, overlap=settings.pipeline_parallel_size > 1)
        kind, method = _AcceptingRunner, _ExpectedTokens(step_time, settings.seed or 0)
        proposals = Proposals([method], method.most)
        proposals.per_decode = step_time.tokens_per_decode, step_time.computed_per_decode, step_time.draft_ms
    runner = kind.from_config(settings, serves_adapters=serves_adapters, clock=clock, sleep=advance)
    return EngineCore(settings, runner, clock=clock, proposals=proposals)
