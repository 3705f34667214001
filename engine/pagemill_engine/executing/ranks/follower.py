"""A rank that follows: it runs the plans of rank 0 on its shard, and samples nothing.

Its rows get the sampled tokens with the next plan. It computes the logits of the same rows as rank 0, because all ranks
compute a divided head together.
"""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np

from pagemill_engine.executing.eager import EagerRunner
from pagemill_engine.executing.inputs import StepInputs
from pagemill_engine.executing.prompt_logprobs import PromptRows
from pagemill_engine.executing.ranks.messages import FollowedStep, Message, decode, plan_of
from pagemill_engine.scheduler.step import StepPlan, StepResult, TokenLogprobs
from pagemill_kernels.arrays import Array
from pagemill_kernels.ranks.ring import RingClosedError, RingReader

logger = logging.getLogger(__name__)

READ_SECONDS = 0.5
"""How often a waiting follower looks whether rank 0 still runs."""


class FollowerRunner(EagerRunner):
    """An `EagerRunner` without a sampler."""

    _unfinished: StepInputs | None = None

    def forget(self) -> None:
        """Leave a step that failed."""
        self._unfinished = None

    def take(self, sampled: dict[str, list[int]], failed: list[str]) -> None:
        """Finish the last step with what rank 0 sampled."""
        inputs, self._unfinished = self._unfinished, None
        if inputs is None:
            return
        names = [inputs.request_ids[index] for index in inputs.sampling.tolist()]
        # A failed request has no token; its row is released before it is read again.
        runs = [sampled.get(name, [0]) for name in names]
        last = np.array([run[-1] for run in runs], dtype=np.int64)
        self._rows.advance(inputs, last, np.array([len(run) - 1 for run in runs], dtype=np.int64))
        self._scrub(failed)

    def _prompt_logprobs(self, plan: StepPlan, inputs: StepInputs, hidden: Array) -> dict[str, list[TokenLogprobs]]:
        starts = dict(zip(inputs.request_ids, inputs.query_start_loc.tolist(), strict=False))
        for piece in PromptRows.of(plan.prompt_targets, starts).pieces(self._piece_rows):
            self.model.logits(hidden[piece.rows])
        return {}

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden: Array) -> StepResult:
        self._unfinished = inputs
        if len(inputs.sampling):
            self.model.logits(hidden)
        return StepResult()


class FollowedGroup(Protocol):
    """What a follower needs of a group besides the sums of its model."""

    rank: int

    @property
    def is_lost(self) -> bool: ...

    def begin_step(self, step: int) -> None:
        """Record the number of the step that this rank computes, for messages."""
        ...

    def abort(self, reason: str) -> None: ...

    def recover(self) -> None: ...


def follow(runner: FollowerRunner, ring: RingReader, group: FollowedGroup) -> None:
    """Run what rank 0 sends until it closes.

    A step that raises ends for all ranks, and this one waits for the next message. Raises what the step has raised if
    the group is lost.
    """
    while (message := _next(ring)) is not None:
        if isinstance(message, FollowedStep):
            _run(runner, message, group)
        elif message.name == "recover":
            runner.forget()
            group.recover()
        else:
            {"sleep": runner.sleep, "wake": runner.wake, "close": runner.close}[message.name]()
            if message.name == "close":
                return


def _run(runner: FollowerRunner, step: FollowedStep, group: FollowedGroup) -> None:
    plan = plan_of(step)
    group.begin_step(plan.step)
    try:
        runner.take(step.sampled, step.failed)
        runner.launch(plan)
    except Exception as error:
        group.abort(f"rank {group.rank} at step {plan.step}: {type(error).__name__}: {error}")
        logger.error("step %d failed on rank %d", plan.step, group.rank, exc_info=error)
        if group.is_lost:
            raise


def _next(ring: RingReader) -> Message | None:
    """Return the next message; None once the ring is closed."""
    while True:
        try:
            data = ring.read(READ_SECONDS)
        except RingClosedError:
            return None
        if data is not None:
            return decode(data)
