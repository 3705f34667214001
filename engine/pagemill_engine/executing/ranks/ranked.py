"""Rank 0 of several: a `Runner` that sends each plan to its followers before it runs it.

A step that raises on one rank raises on all and fails as a whole; before the next one all begin anew. If a follower
stops or ends, every later step raises `RanksLostError`, which ends the engine with the name of the rank, the step and
the cut: its requests continue on other engines.
"""

from __future__ import annotations

from typing import Any, Protocol

from pagemill_engine.executing.base import Runner, RunnerInfo
from pagemill_engine.executing.errors import DeviceLostError
from pagemill_engine.executing.ranks.messages import Command, encode_command, encode_step
from pagemill_engine.scheduler.step import StepPlan, StepResult
from pagemill_kernels.ranks.group import GroupAborted
from pagemill_kernels.ranks.ring import ReaderStoppedError, RingClosedError, RingWriter


class RanksLostError(DeviceLostError):
    """The ranks of this engine compute nothing more together."""

    reason = "RankLost"


class WatchedGroup(Protocol):
    """What rank 0 needs of a group besides the sums of its model."""

    def begin_step(self, step: int) -> None: ...

    def abort(self, reason: str) -> None: ...

    def reason(self) -> str | None: ...

    @property
    def is_lost(self) -> bool: ...

    def lose(self, reason: str) -> None: ...

    def reset(self) -> None: ...


class Followers(Protocol):
    """The processes, or threads, of the other ranks."""

    def close(self) -> None:
        """Wait until all have ended; end those that do not."""
        ...


class RankedRunner:
    """Wraps a runner that has computed a step when `launch` returns; `ThreadedRunner` makes both overlap."""

    def __init__(self, inner: Runner, ring: RingWriter, group: WatchedGroup, followers: Followers) -> None:
        self.info: RunnerInfo = inner.info
        self._inner = inner
        self._ring, self._group, self._followers = ring, group, followers
        self._before = StepResult()
        self._has_failed = False
        """Whether the last step raised here."""

    def launch(self, plan: StepPlan) -> StepResult:
        before, self._before = self._before, StepResult()
        self._send(encode_step(plan, before))
        self._group.begin_step(plan.step)
        try:
            self._before = self._inner.wait(self._inner.launch(plan))
        except Exception as error:
            self._has_failed = True
            # Followers may wait for sums that never come.
            self._group.abort(f"rank 0 at step {plan.step}: {type(error).__name__}: {error}")
            self._raise_if_lost(error)
            raise
        return self._before

    def wait(self, handle: Any) -> StepResult:
        result: StepResult = handle
        return result

    def sleep(self) -> int:
        self._send(encode_command(Command("sleep")))
        return self._inner.sleep()

    def wake(self) -> None:
        self._send(encode_command(Command("wake")))
        self._inner.wake()

    def close(self) -> None:
        try:
            self._send(encode_command(Command("close")))
        except RanksLostError:
            pass  # they have ended or are about to be
        finally:
            self._ring.close()
            self._followers.close()
            self._inner.close()

    def _send(self, message: bytes) -> None:
        """Send a message, behind a failed step to ranks that have begun anew."""
        self._raise_if_lost()
        if (reason := self._group.reason()) is not None:
            if not self._has_failed:  # a follower has lost a step that counts here
                self._group.lose(reason)
                self._raise_if_lost()
            self._write(encode_command(Command("recover")))
            try:
                self._group.reset()
            except GroupAborted as error:
                self._raise_if_lost(error)
                raise
        self._has_failed = False
        self._write(message)

    def _write(self, message: bytes) -> None:
        try:
            self._ring.write(message)
        except (ReaderStoppedError, RingClosedError) as error:
            self._group.lose(str(error))
            self._raise_if_lost(error)

    def _raise_if_lost(self, cause: Exception | None = None) -> None:
        if self._group.is_lost:
            raise RanksLostError(f"The ranks of this engine stopped: {self._group.reason()}") from cause
