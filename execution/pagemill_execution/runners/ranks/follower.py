"""A rank that follows: it runs the plans of rank 0 on its shard, and samples nothing.

Its rows get the sampled tokens with a later plan. It computes the logits of the same rows as rank 0, because all ranks
of a stage compute a divided head together; a stage without the head computes none.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from pagemill_execution.adapters.messages import AdapterMessage
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.runners.eager import EagerRunner
from pagemill_execution.runners.inputs import StepInputs
from pagemill_execution.runners.prompt_logprobs import PromptRows
from pagemill_execution.runners.ranks.messages import FollowedStep, Message, SampledStep, decode, plan_of
from pagemill_execution.step import StepPlan, StepResult, TokenLogprobs
from pagemill_kernels.arrays import Array
from pagemill_kernels.ranks.group import GroupAborted
from pagemill_kernels.ranks.places import PLAN
from pagemill_kernels.ranks.ring import RingClosedError

logger = logging.getLogger(__name__)

READ_SECONDS = 0.5
"""How often a waiting follower looks whether rank 0 still runs."""


class _Unfinished(NamedTuple):
    """A step whose sampled tokens are not known here."""

    step: int
    inputs: StepInputs
    released: set[str]
    """Requests that have left since: others may have their rows."""


class FollowerRunner(EagerRunner):
    """An `EagerRunner` without a sampler."""

    def __init__(self, *args: Any, read_adapter: Callable[[AdapterMessage], None] | None = None) -> None:
        """`read_adapter`: reads one beside the steps, and answers rank 0; None: no adapters are served."""
        super().__init__(*args)
        self._read_adapter = read_adapter
        self._unfinished: deque[_Unfinished] = deque()
        self._has_head = self.model.spec.decoder.head is not None

    def read_adapter(self, message: AdapterMessage) -> None:
        assert self._read_adapter is not None, "rank 0 serves adapters only where its followers do"
        self._read_adapter(message)

    def forget(self) -> None:
        """Leave steps that failed."""
        self._unfinished.clear()

    def take(self, before: Iterable[SampledStep]) -> None:
        """Finish steps with what rank 0 sampled."""
        for sampled in before:
            if self._unfinished and self._unfinished[0].step == sampled.step:
                self._finish(self._unfinished.popleft(), sampled)

    def _apply_differences(self, plan: StepPlan) -> None:
        for unfinished in self._unfinished:
            unfinished.released.update(plan.released)
        super()._apply_differences(plan)

    def _answer(self, plan: StepPlan, inputs: StepInputs, hidden: Array) -> StepResult:
        # The next part of a prompt may come before the step is finished.
        self._rows.num_computed_tokens[inputs.rows] = inputs.seq_lens
        self._unfinished.append(_Unfinished(plan.step, inputs, set()))
        return super()._answer(plan, inputs, hidden) if self._has_head else StepResult()

    def _prompt_logprobs(self, plan: StepPlan, inputs: StepInputs, hidden: Array) -> dict[str, list[TokenLogprobs]]:
        starts = dict(zip(inputs.request_ids, inputs.query_start_loc.tolist(), strict=False))
        for piece in PromptRows.of(plan.prompt_targets, starts).pieces(self._piece_rows):
            self.model.logits(hidden[piece.rows], self._adapters_of(inputs, piece.rows))
        return {}

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden: Array) -> StepResult:
        if len(inputs.sampling):
            self.model.logits(hidden, self._adapters_of(inputs, inputs.sampled_tokens))
        return StepResult()

    def _finish(self, unfinished: _Unfinished, sampled: SampledStep) -> None:
        inputs = unfinished.inputs
        places = inputs.sampling.tolist()
        names = [inputs.request_ids[index] for index in places]
        own = [number for number, name in enumerate(names) if name not in unfinished.released]
        # A failed request has no token; its row is released before it is read again.
        runs = [sampled.sampled.get(names[number], [0]) for number in own]
        num_accepted = np.array([len(run) - 1 for run in runs], dtype=np.int64)
        num_rejected = None if inputs.num_proposed is None else inputs.num_proposed[own] - num_accepted
        last = np.array([run[-1] for run in runs], dtype=np.int64)
        self._rows.append(inputs.rows[inputs.sampling[own]], last, num_accepted, num_rejected)
        for name in sampled.failed:
            # The blocks may belong to another request by now, whose finite values stay as they are.
            place = inputs.request_ids.index(name)
            for cache, table in zip(self.kv_cache.of_kinds, inputs.block_tables, strict=False):  # states have no table
                cache.scrub(table[place].astype(np.int64))


class FollowedGroup(Protocol):
    """What a follower needs of a group besides the sums of its model."""

    rank: int

    @property
    def is_lost(self) -> bool: ...

    def begin_step(self, step: int) -> None:
        """Record the number of the step that this rank computes, for messages."""
        ...

    def come_to(self, place: int) -> None: ...

    def place(self, rank: int) -> str: ...

    def report(self) -> None: ...

    def abort(self, reason: str) -> None: ...

    def recover(self) -> None: ...


class MessageReader(Protocol):
    def read(self, seconds: float) -> bytes | None:
        """Return the next message, or None if none is complete after so long. Raises `RingClosedError`."""
        ...


class Follower(Protocol):
    """The runner of a rank that follows."""

    info: RunnerInfo

    def take(self, before: Iterable[SampledStep]) -> None: ...

    def launch(self, plan: StepPlan) -> Any:
        """Compute a step, or queue it for a device. Raises what goes wrong."""
        ...

    def forget(self) -> None: ...

    def read_adapter(self, message: AdapterMessage) -> None: ...

    def sleep(self) -> int: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def follow(runner: Follower, ring: MessageReader, group: FollowedGroup) -> bool:
    """Run what rank 0 sends until it closes. Returns whether it has said so, and not only ended.

    A step that raises ends for all ranks; those that were sent behind it are left out until rank 0 begins anew. Raises
    what the step has raised if the group is lost.
    """
    has_failed = False
    while True:
        group.come_to(PLAN)
        message = _next(ring)
        if message is None:
            return False
        if isinstance(message, FollowedStep):
            has_failed = has_failed or not _run(runner, message, group)
        elif isinstance(message, AdapterMessage):
            runner.read_adapter(message)
        elif message.name == "recover":
            has_failed = False
            runner.forget()
            group.recover()
        else:
            {"sleep": runner.sleep, "wake": runner.wake, "close": runner.close}[message.name]()
            if message.name == "close":
                return True


def _run(runner: Follower, step: FollowedStep, group: FollowedGroup) -> bool:
    """Run a step. Returns whether it succeeded."""
    plan = plan_of(step)
    group.begin_step(plan.step)
    try:
        runner.take(step.before)
        runner.launch(plan)
        group.report()
    except Exception as error:
        _fail(group, error)
        return False
    return True


def _fail(group: FollowedGroup, error: Exception) -> None:
    """End the step for all ranks. Raises the error if they compute nothing more."""
    group.abort(f"rank {group.rank} {group.place(group.rank)}: {type(error).__name__}: {error}")
    if not isinstance(error, GroupAborted):  # else another rank reports it
        logger.error("a step failed on rank %d", group.rank, exc_info=error)
    if group.is_lost:
        raise error


def _next(ring: MessageReader) -> Message | None:
    """Return the next message; None once the ring is closed."""
    while True:
        try:
            data = ring.read(READ_SECONDS)
        except RingClosedError:
            return None
        if data is not None:
            return decode(data)
