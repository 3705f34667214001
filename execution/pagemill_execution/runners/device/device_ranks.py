"""Runners of ranks whose steps run on devices, and how they notice that one of them is lost.

All ranks queue the same steps. Those that divide a vocabulary search their columns (`sampling.triton_parts`); rank 0
alone decides. With one stage it sends the tokens device to device, so that no host is waited for; with several, other
stages get them with a later plan, since a stage must not wait for a step that is still in the stages behind it. A step
that raises on one rank ends the engine: the others have queued exchanges that no host takes back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_execution.adapters.messages import AdapterMessage
from pagemill_execution.runners.device.device_drafter import DeviceDraft
from pagemill_execution.runners.device.device_forward import Neighbours
from pagemill_execution.runners.device.device_rows import DeviceStep
from pagemill_execution.runners.device.device_runner import DeviceRunner, InFlight
from pagemill_execution.runners.ranks.messages import SampledStep
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.sampling.runs import masks_of
from pagemill_execution.step import StepPlan
from pagemill_kernels.adapters.triton_launch import TritonAdapterRows
from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.ranks.device_marks import END, DeviceMarks, Reached
from pagemill_kernels.ranks.distributed import wait_for
from pagemill_kernels.ranks.group import ComputedTime, GroupAborted
from pagemill_kernels.ranks.places import OUTSIDE, REPORT, STUCK_SECONDS, RankStatus
from pagemill_kernels.request_rows.layout import DeviceStepInputs, StepRows
from pagemill_kernels.request_rows.staging import Staging
from pagemill_kernels.sampling.batch import Reports, SamplingBatch, TokenMasks
from pagemill_kernels.sampling.device_sample import DeviceSample, Report
from pagemill_kernels.sampling.triton_parts import DividedSampler, Filters

_SAY_S = 0.05
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

    def add_computed(self, seconds: float, steps: int) -> None: ...

    def computed(self) -> list[ComputedTime]: ...


class DeviceSignals:
    """A rank's end of a `HostGroup` whose values go elsewhere: where the device of each rank is, and that one is lost.

    A thread says where the device is, which comes to its exchanges long after the host has queued them.
    """

    def __init__(
        self, group: HostGroup, device: torch.device, members: int, stuck_seconds: float = STUCK_SECONDS
    ) -> None:
        """`members`: the ranks of each stage; those with the highest numbers run the first one."""
        self.rank, self._group, self._stuck_seconds = group.rank, group, stuck_seconds
        self._members, self._marks = members, DeviceMarks(device)
        self.status, self.reason, self.computed = group.status, group.reason, group.computed
        self.recover, self.reset = group.recover, group.reset
        self.end: Callable[[], None] = lambda: None
        """Ends what devices wait for."""
        self._said = Reached(0, 0, 0.0, 0)
        self._saying = threading.Lock()
        self._behind: dict[int, tuple[tuple[tuple[int, int], tuple[int, int]], float]] = {}
        """Where ranks are that others are ahead of, where these wait, and for how long both were so while rank 0
        waited."""
        self._looked_s = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._say_often, name="marks", daemon=True)
        self._thread.start()

    def begin_step(self, step: int) -> None:
        self._marks.begin(step)

    def come(self) -> None:
        self._marks.exchange()

    def leave(self) -> None:
        self._marks.leave()

    def come_to(self, place: int) -> None:
        """Do nothing: where the host is says nothing of the device."""

    def report(self) -> None:
        """Queue the end of the step."""
        self._marks.end()

    def say(self) -> None:
        """Say where the device is, and what it has computed."""
        with self._saying:
            found, before = self._marks.read(), self._said
            self._said = found
            if found[:2] != before[:2]:
                self._group.begin_step(found.step)
                self._group.come_to(REPORT if found.exchange == END else OUTSIDE, found.exchange)
            if found.num_steps != before.num_steps:
                self._group.add_computed(found.computed_s - before.computed_s, found.num_steps - before.num_steps)

    def place(self, rank: int) -> str:
        if rank == self.rank:
            self.say()
        return self._group.place(rank)

    @property
    def is_lost(self) -> bool:
        return self._group.is_lost

    def abort(self, reason: str) -> None:
        self.lose(reason)

    def lose(self, reason: str) -> None:
        self._group.lose(reason)
        self.end()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def look(self) -> None:
        """Raise `GroupAborted` if the group is lost; rank 0 finds a rank that has come to nothing more for too long
        although others wait for it."""
        if self.rank == 0 and not self.is_lost:
            self._look_for_stuck()
        if self.is_lost:
            raise GroupAborted(self.reason() or "the group is lost")

    def _say_often(self) -> None:
        while not self._closing.wait(_SAY_S):
            self.say()

    def _look_for_stuck(self) -> None:
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        self.say()
        ranks = range(self._group.size)
        places = [(each.step, each.cut) for each in map(self.status, ranks)]
        stuck = []
        for rank in ranks:
            found = places[rank], self._awaited(rank, places)
            if found[0] >= found[1]:
                self._behind.pop(rank, None)
                continue
            before, waited_s = self._behind.get(rank, (None, 0.0))
            waited_s = waited_s + passed_s if before == found else 0.0
            self._behind[rank] = found, waited_s
            if waited_s >= self._stuck_seconds:
                stuck.append(rank)
        if not stuck:
            return
        # Later stages wait for earlier ones, and in each all wait for the last.
        rank = min(stuck, key=lambda each: (places[each][0], -(each // self._members), places[each]))
        first = rank - rank % self._members
        ahead = max(range(first, first + self._members), key=places.__getitem__)
        ahead = ahead if places[ahead] > places[rank] else 0
        self.lose(
            f"rank {rank} has not reached {self.place(ahead).removeprefix('at ')} within {self._stuck_seconds:g} s; it "
            f"was last {self.place(rank)}"
        )

    def _awaited(self, rank: int, places: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return the place to which a rank must come for others to go on."""
        first = rank - rank % self._members
        found = max(places[first : first + self._members])
        return found if rank < self._members else max(found, (places[0][0], END))


class _RankRunner(DeviceRunner):
    """A rank that may divide the vocabulary with others."""

    def __init__(self, *args: Any, neighbours: Neighbours, draft: DeviceDraft | None = None) -> None:
        super().__init__(*args, neighbours=neighbours, draft=draft)
        self._divided: DividedSampler | None = None
        if neighbours.stage is not None and self._forward.has_head:
            self._divided = DividedSampler(neighbours.stage, self._forward.columns, self.info.vocab_size)

    def _masks(self, plan: StepPlan, request_ids: list[str]) -> TokenMasks | None:
        """Return masks of all tokens of requests that have any: followers know only their names."""
        if self._divided is None:
            return super()._masks(plan, request_ids)
        masks = masks_of(plan, request_ids)
        named = [name in plan.token_masks for name in request_ids for _ in range(1 + len(plan.proposals.get(name, ())))]
        rows, num_words = np.flatnonzero(named), -(-self.info.vocab_size // 32)
        bits = np.full((len(rows), num_words), -1, dtype=np.int32)
        for place, row in enumerate(rows.tolist()):
            mask = masks[row]
            if mask is not None:
                bits[place] = mask[:num_words]
        return TokenMasks(rows, bits) if len(rows) else None

    def _drawn(
        self, logits: Tensor, batch: SamplingBatch, settings: Tensor, sampling: SamplingRows, rows: NDArray[Any]
    ) -> DeviceSample:
        if self._divided is None or not len(rows):
            return super()._drawn(logits, batch, settings, sampling, rows)
        return self._divided.draw(logits, batch, settings, Filters.of(sampling.draws[rows], self.info.vocab_size))

    def _reported(self, logits: Tensor, token_ids: Tensor, reports: Reports) -> Report:
        if self._divided is None:
            return super()._reported(logits, token_ids, reports)
        return self._divided.report(logits, token_ids, reports)


class LeadingDeviceRunner(_RankRunner):
    """Rank 0. What drafts has it whole, and runs it behind its part of each step."""

    def __init__(
        self, *args: Any, neighbours: Neighbours, signals: DeviceSignals, leave: Callable[[], None], at_once: bool,
        draft: DeviceDraft | None = None,
    ) -> None:  # fmt: skip
        """`leave`: leaves the groups. `at_once`: of `FollowingDeviceRunner`."""
        super().__init__(*args, neighbours=neighbours, draft=draft)
        self._signals, self._leave = signals, leave

    def close(self) -> None:
        super().close()
        self._signals.close()
        self._leave()

    def _end(self) -> None:
        self._signals.report()  # drafting is no part of the time by which ranks are compared

    def _until(self, done: torch.cuda.Event) -> None:
        wait_for(done.query, self._signals.look)


class _Unfinished(NamedTuple):
    """A step whose sampled tokens are not known here."""

    number: int
    step: DeviceStep
    released: set[str]
    """Requests that have left since: others may have their rows."""


class FollowingDeviceRunner(_RankRunner):
    """Another rank: it decides nothing."""

    def __init__(
        self,
        *args: Any,
        neighbours: Neighbours,
        at_once: bool,
        read_adapter: Callable[[AdapterMessage], None] | None,
    ) -> None:
        """`at_once`: whether the tokens that rank 0 finds count at once, and not with a later plan. `read_adapter`: of
        `FollowerRunner`."""
        super().__init__(*args, neighbours=neighbours)
        self._at_once = at_once
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
        for piece in self._pieces(plan, step):
            if self._forward.has_head:
                self._report(hidden, piece, adapters)
        logits = self._forward.logits_of(hidden, inputs.last_tokens[: step.num_sampled], adapters)
        return self._sample(plan, at, step, logits, inputs.settings)

    def _sample(self, plan: StepPlan, at: StepRows, step: DeviceStep, logits: Tensor, settings: Tensor) -> InFlight:
        if self._forward.has_head and step.num_sampled:
            tokens = self._draw(plan, step, logits, settings)[0].tokens
        else:
            tokens = torch.empty(step.num_sampled, dtype=torch.int64, device=self._ops.device)
        if self._at_once:
            self._rows.advance(step)
        else:
            # The next part of a prompt may come before the step is finished.
            at = at._replace(sample_start_loc=torch.zeros_like(at.sample_start_loc))
            self._unfinished.append(_Unfinished(plan.step, step, set()))
        self._on_device.advance_rows(self._state, at, tokens)
        return InFlight([])

    def _finish(self, unfinished: _Unfinished, sampled: SampledStep) -> None:
        step, released = unfinished.step, unfinished.released
        own = [place for place in step.sampling.tolist() if step.request_ids[place] not in released]
        # A failed request has no token; its row is released before it is read again.
        runs = [sampled.sampled.get(step.request_ids[place], [0]) for place in own]
        rows, widths = step.rows[own], np.diff(step.sample_start_loc)[own]
        starts = np.concatenate(([0], np.cumsum(widths)), dtype=np.int32)
        tokens = np.full(starts[-1], -1, dtype=np.int64)  # behind a run nothing was sampled
        for start, run in zip(starts.tolist(), runs, strict=False):
            tokens[start : start + len(run)] = run
        _, at = Staging().upload(rows, np.zeros_like(starts), starts, self._ops.device)
        self._on_device.advance_rows(self._state, at, upload(tokens, self._ops.device))
        self._rows.num_tokens[rows] += [len(run) for run in runs]
