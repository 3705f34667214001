"""Rank 0 of several: a `Runner` that sends each plan to its followers before it runs it.

Rank 0 runs the last stage, so that it has the logits, samples, and gives the results. With one stage a step has run
when `launch` returns (`ThreadedRunner` makes it overlap); with several, `launch` returns at once, and each stage
computes another step. Steps are read in the order of their launch.

A step that raises on one rank raises on all and fails as a whole; those behind it fail too, those before it do not.
Before the next one all begin anew. If a follower stops or ends, every later step raises `RanksLostError`, which ends
the engine with the name of the rank, the step and the cut: its requests continue on other engines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from pagemill_execution.adapters.messages import AdapterMessage
from pagemill_execution.runners.base import Runner, RunnerInfo
from pagemill_execution.runners.eager import ThreadedRunner
from pagemill_execution.runners.errors import DeviceLostError
from pagemill_execution.runners.ranks.messages import Command, SampledStep, encode_message, encode_step
from pagemill_execution.runners.ranks.speeds import RankSpeeds
from pagemill_execution.step import StepPlan, StepResult
from pagemill_kernels.ranks.group import ComputedTime, GroupAborted
from pagemill_kernels.ranks.ring import ReaderStoppedError, RingClosedError
from pagemill_protocol.report.state import RankTimes


class RanksLostError(DeviceLostError):
    """The ranks of this engine compute nothing more together."""

    reason = "RankLost"


class WatchedGroup(Protocol):
    """What rank 0 needs of a group besides the sums of its model."""

    def begin_step(self, step: int) -> None: ...

    def report(self) -> None: ...

    def place(self, rank: int) -> str: ...

    def abort(self, reason: str) -> None: ...

    def reason(self) -> str | None: ...

    @property
    def is_lost(self) -> bool: ...

    def lose(self, reason: str) -> None: ...

    def reset(self) -> None: ...

    def computed(self) -> list[ComputedTime]: ...


class MessageWriter(Protocol):
    def write(self, message: bytes) -> None:
        """Give a message to all followers. Raises `ReaderStoppedError` and `RingClosedError`."""
        ...

    def close(self) -> None: ...


class Followers(Protocol):
    """The processes, or threads, of the other ranks."""

    def close(self) -> None:
        """Wait until all have ended; end those that do not."""
        ...

    def kill(self) -> None:
        """End all at once."""
        ...


class _Launched(NamedTuple):
    step: int
    handle: Any


class RankedRunner:
    """Wraps a runner that has computed a step when `launch` returns."""

    def __init__(
        self,
        inner: Runner,
        ring: MessageWriter,
        group: WatchedGroup,
        followers: Followers,
        speeds: RankSpeeds,
        num_stages: int = 1,
        prepare_thread: Callable[[], object] | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        """Start with followers that have loaded. `speeds`: judges all ranks. `prepare_thread`: of a thread that
        computes (`ThreadedRunner`). `on_device`: whether `inner` only queues steps."""
        self._inner: Runner = (_FirstDevice if on_device else _FirstRank)(inner, group)
        if num_stages > 1 and not on_device:
            self._inner = ThreadedRunner(self._inner, prepare_thread)
        self.info: RunnerInfo = self._inner.info._replace(
            stages=num_stages, check=self._raise_if_lost, ranks=self._times
        )
        self._speeds = speeds
        self._ring, self._group, self._followers = ring, group, followers
        self._writing = threading.Lock()
        self._read: list[SampledStep] = []
        """The steps that were read since the last plan."""
        self._num_unread = 0
        self._has_failed = False
        """Whether a step has raised here since all ranks began anew."""

    def launch(self, plan: StepPlan) -> _Launched:
        self._raise_if_failed()
        self._begin_anew()
        self._write(encode_step(plan, self._read), f"the plan of step {plan.step}")
        self._read = []
        self._num_unread += 1
        try:
            return _Launched(plan.step, self._inner.launch(plan))
        except Exception as error:
            self._note_failure(error)
            raise

    def wait(self, handle: _Launched) -> StepResult:
        try:
            result = self._inner.wait(handle.handle)
        except Exception as error:
            self._note_failure(error)
            raise
        self._num_unread -= 1
        self._read.append(SampledStep.of(handle.step, result))
        return result

    def sleep(self) -> int:
        self._command("sleep")
        return self._inner.sleep()

    def wake(self) -> None:
        self._command("wake")
        self._inner.wake()

    def close(self) -> None:
        try:
            self._command("close")
        except RanksLostError:
            self._followers.kill()  # one that is stopped would not end by itself
        finally:
            self._ring.close()
            self._followers.close()
            self._inner.close()

    def read_adapter(self, message: AdapterMessage) -> None:
        """Let followers read an adapter beside their steps. Any thread may call it."""
        self._write(encode_message(message), f"adapter {message.number}")

    def _times(self) -> RankTimes:
        computed = self._group.computed()
        self._speeds.look(computed)
        return RankTimes([round(each.seconds, 3) for each in computed], self._speeds.slow)

    def _raise_if_failed(self) -> None:
        """Let a step fail that is launched while others may still be computed, or behind one that a follower has left
        after its last exchange: its rows lack what was sampled."""
        reason = self._group.reason()
        self._raise_if_lost()
        if reason is not None and (self._num_unread or not self._has_failed):
            self._has_failed = True
            raise GroupAborted(reason)

    def _begin_anew(self) -> None:
        """Let all ranks begin anew behind a failed step."""
        self._raise_if_lost()
        if self._group.reason() is not None:
            self._write(encode_message(Command("recover")), "what follows a failed step")
            try:
                self._group.reset()
            except GroupAborted as error:
                self._raise_if_lost(error)
                raise
            self._read = []
        self._has_failed = False

    def _command(self, name: Any) -> None:
        self._begin_anew()
        self._write(encode_message(Command(name)), f"the command {name}")

    def _write(self, message: bytes, what: str) -> None:
        try:
            with self._writing:
                self._ring.write(message)
        except (ReaderStoppedError, RingClosedError) as error:
            self._group.lose(f"{error}; it lacks {what}")
            self._raise_if_lost(error)

    def _note_failure(self, error: Exception) -> None:
        self._num_unread -= 1
        self._has_failed = True
        self._raise_if_lost(error)

    def _raise_if_lost(self, cause: Exception | None = None) -> None:
        if self._group.is_lost:
            raise RanksLostError(f"The ranks of this engine stopped: {self._group.reason()}") from cause


class _FirstRank:
    """Rank 0's part of the steps. Followers may wait for sums of one that has raised: it ends for all."""

    def __init__(self, inner: Runner, group: WatchedGroup) -> None:
        self.info: RunnerInfo = inner.info
        self._inner, self._group = inner, group
        self.sleep, self.wake, self.close = inner.sleep, inner.wake, inner.close

    def launch(self, plan: StepPlan) -> StepResult:
        self._group.begin_step(plan.step)
        try:
            result = self._inner.wait(self._inner.launch(plan))
            self._group.report()
        except Exception as error:
            self._group.abort(f"rank 0 {self._group.place(0)}: {type(error).__name__}: {error}")
            raise
        return result

    def wait(self, handle: Any) -> StepResult:
        result: StepResult = handle
        return result


class _FirstDevice(_FirstRank):
    """Rank 0's part of the steps of devices, which run after `launch` has returned."""

    def launch(self, plan: StepPlan) -> Any:
        self._group.begin_step(plan.step)
        return self._inner.launch(plan)  # what raises there is raised by `wait`

    def wait(self, handle: Any) -> StepResult:
        try:
            return self._inner.wait(handle)
        except Exception as error:
            self._group.abort(f"rank 0 {self._group.place(0)}: {type(error).__name__}: {error}")
            raise
