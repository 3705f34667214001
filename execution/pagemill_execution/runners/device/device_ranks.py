"""Runners of ranks whose steps run on devices, and how they notice that one of them is lost.

All ranks queue the same steps; rank 0 alone samples. With one stage it sends the tokens behind its draw, device to
device, so that no host is waited for; with several, followers get them with a later plan, since a stage must not wait
for a step that is still in the stages behind it. A step that raises on one rank ends the engine: the others have queued
exchanges that no host takes back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pagemill_execution.adapters.messages import AdapterMessage
from pagemill_execution.runners.device.device_rows import DeviceStep
from pagemill_execution.runners.device.device_runner import DeviceRunner, InFlight
from pagemill_execution.runners.prompt_logprobs import PromptRows
from pagemill_execution.runners.ranks.messages import SampledStep
from pagemill_execution.step import StepPlan
from pagemill_kernels.adapters.triton_launch import TritonAdapterRows
from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.ranks.distributed import DistributedGroup, wait_for
from pagemill_kernels.ranks.group import ComputedTime, GroupAborted
from pagemill_kernels.ranks.places import OUTSIDE, STUCK_SECONDS, RankStatus
from pagemill_kernels.request_rows.layout import DeviceStepInputs, StepRows
from pagemill_kernels.request_rows.staging import Staging
from pagemill_kernels.sampling.batch import SamplingBatch
from pagemill_kernels.sampling.device_sample import DeviceSample

_LONGEST_LOOK_S = 0.1
"""The most that one look counts, so that a process that was stopped itself accuses none."""


class HostGroup(Protocol):
    """What carries signals between the ranks: a group of the host, in shared memory or over TCP."""

    rank: int
    size: int

    def begin_step(self, step: int) -> None: ...

    def come_to(self, place: int, cut: int | None = None) -> None: ...

    def status(self, rank: int) -> RankStatus: ...

    def place(self, rank: int) -> str: ...

    def lose(self, reason: str) -> None: ...

    def recover(self) -> None: ...

    def reset(self) -> None: ...

    def reason(self) -> str | None: ...

    @property
    def is_lost(self) -> bool: ...

    def computed(self) -> list[ComputedTime]: ...


class DeviceSignals:
    """A rank's end of a `HostGroup` whose values go elsewhere: where each rank is, and that one is lost."""

    def __init__(self, group: HostGroup, stuck_seconds: float = STUCK_SECONDS) -> None:
        self.rank, self._group, self._stuck_seconds = group.rank, group, stuck_seconds
        self.status, self.place, self.reason, self.computed = group.status, group.place, group.reason, group.computed
        self.recover, self.reset = group.recover, group.reset
        self.end: Callable[[], None] = lambda: None
        """Ends what devices wait for."""
        self._number = 0
        """Of this rank's exchange in its step."""
        self._behind: dict[int, tuple[RankStatus, float]] = {}
        """What ranks were last at that rank 0 is ahead of, and for how long it has waited since."""
        self._looked_s = time.monotonic()

    def begin_step(self, step: int) -> None:
        self._number = 0
        self._group.begin_step(step)
        self._group.come_to(OUTSIDE, 0)

    def come(self) -> None:
        self._number += 1
        self._group.come_to(OUTSIDE, self._number)

    def come_to(self, place: int) -> None:
        self._group.come_to(place, self._number)

    def report(self) -> None:
        """Do nothing: the device still runs the step."""

    @property
    def is_lost(self) -> bool:
        return self._group.is_lost

    def abort(self, reason: str) -> None:
        self.lose(reason)

    def lose(self, reason: str) -> None:
        self._group.lose(reason)
        self.end()

    def look(self) -> None:
        """Raise `GroupAborted` if the group is lost; rank 0 finds a rank that has come to nothing more for too long
        although it is behind."""
        if self.rank == 0 and not self.is_lost:
            self._look_for_stuck()
        if self.is_lost:
            raise GroupAborted(self.reason() or "the group is lost")

    def _look_for_stuck(self) -> None:
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        own = self.status(0)
        for rank in range(1, self._group.size):
            found = self.status(rank)
            if (found.step, found.cut) >= (own.step, own.cut):
                self._behind.pop(rank, None)
                continue
            before, waited_s = self._behind.get(rank, (None, 0.0))
            waited_s = waited_s + passed_s if before == found else 0.0
            self._behind[rank] = found, waited_s
            if waited_s >= self._stuck_seconds:
                cut = self.place(0).removeprefix("at ")
                self.lose(
                    f"rank {rank} has not reached {cut} within {self._stuck_seconds:g} s; it was last "
                    f"{self.place(rank)}"
                )


class LeadingDeviceRunner(DeviceRunner):
    """Rank 0."""

    def __init__(
        self, *args: Any, signals: DeviceSignals, leave: Callable[[], None], tokens: DistributedGroup | None
    ) -> None:
        """`leave`: leaves the groups. `tokens`: all ranks, to which sampled tokens go at once; None: they go with
        plans."""
        super().__init__(*args)
        self._signals, self._leave, self._to_all = signals, leave, tokens

    def close(self) -> None:
        super().close()
        self._leave()

    def _drawn(self, logits: Tensor, batch: SamplingBatch, settings: Tensor) -> DeviceSample:
        found = super()._drawn(logits, batch, settings)
        if self._to_all is not None and len(found.tokens):
            self._to_all.broadcast(found.tokens, 0)
        return found

    def _until(self, done: torch.cuda.Event) -> None:
        wait_for(done.query, self._signals.look)


class _Unfinished(NamedTuple):
    """A step whose sampled tokens are not known here."""

    number: int
    step: DeviceStep
    released: set[str]
    """Requests that have left since: others may have their rows."""


class FollowingDeviceRunner(DeviceRunner):
    """Another rank: it samples nothing."""

    def __init__(
        self,
        *args: Any,
        tokens: DistributedGroup | None,
        read_adapter: Callable[[AdapterMessage], None] | None,
    ) -> None:
        """`tokens`: of `LeadingDeviceRunner`. `read_adapter`: of `FollowerRunner`."""
        super().__init__(*args)
        self._from_first = tokens
        self._read_adapter = read_adapter
        self._unfinished: deque[_Unfinished] = deque()

    def read_adapter(self, message: AdapterMessage) -> None:
        assert self._read_adapter is not None, "rank 0 serves adapters only where its followers do"
        self._read_adapter(message)

    def forget(self) -> None:
        """Do nothing: a step that fails ends the engine."""

    def take(self, before: Iterable[SampledStep]) -> None:
        """Finish steps with what rank 0 sampled."""
        for sampled in before:
            if self._unfinished and self._unfinished[0].number == sampled.step:
                self._finish(self._unfinished.popleft(), sampled)
                continue
            for name, tokens in sampled.sampled.items():  # the device has them; proposed ones count only now
                self._rows.accept(name, len(tokens) - 1)

    def launch(self, plan: StepPlan) -> InFlight:
        for unfinished in self._unfinished:
            unfinished.released.update(plan.released)
        handle = super().launch(plan)
        if handle.error is not None:
            raise handle.error
        return handle

    def _report_and_sample(
        self,
        plan: StepPlan,
        at: StepRows,
        step: DeviceStep,
        inputs: DeviceStepInputs,
        hidden: Tensor,
        adapters: TritonAdapterRows | None,
    ) -> InFlight:
        starts = dict(zip(step.request_ids, step.query_start_loc.tolist(), strict=False))
        for piece in PromptRows.of(plan.prompt_targets, starts).pieces(self._piece_rows):
            self._forward.logits_of(hidden, upload(piece.rows, self._ops.device), adapters)
        logits = self._forward.logits_of(hidden, inputs.last_tokens[: step.num_sampled], adapters)
        return self._sample(plan, at, step, logits, inputs.settings)

    def _sample(self, plan: StepPlan, at: StepRows, step: DeviceStep, logits: Tensor, settings: Tensor) -> InFlight:
        tokens = torch.empty(step.num_sampled, dtype=torch.int64, device=self._ops.device)
        if self._from_first is None:
            # The next part of a prompt may come before the step is finished.
            at = at._replace(sample_start_loc=torch.zeros_like(at.sample_start_loc))
            self._unfinished.append(_Unfinished(plan.step, step, set()))
        elif len(tokens):
            self._from_first.broadcast(tokens, 0)
            self._rows.advance(step)
        self._on_device.advance_rows(self._state, at, tokens)
        return InFlight([])

    def _finish(self, unfinished: _Unfinished, sampled: SampledStep) -> None:
        step, released = unfinished.step, unfinished.released
        own = [place for place in step.sampling.tolist() if step.request_ids[place] not in released]
        # A failed request has no token; its row is released before it is read again.
        tokens = [sampled.sampled.get(step.request_ids[place], [0])[-1] for place in own]
        rows, starts = step.rows[own], np.arange(len(own) + 1, dtype=np.int32)
        _, at = Staging().upload(rows, np.zeros_like(starts), starts, self._ops.device)
        found = upload(np.array(tokens, dtype=np.int64), self._ops.device)
        self._on_device.advance_rows(self._state, at, found)
        self._rows.num_tokens[rows] += 1
