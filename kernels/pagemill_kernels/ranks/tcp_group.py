"""A group of ranks on several machines over TCP, without torch.

Each pair of ranks has a connection. A rank sends its values to all members of its stage and adds what it gets in the
order of ranks, so that all have the same bits. Frames carry the number of times that all ranks have begun anew: what is
left of a failed step is read and dropped. What other ranks do comes by `rank_signals`, which also ends the group.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np

from pagemill_kernels.arrays import Array
from pagemill_kernels.ranks.group import ComputedTime, GroupAborted
from pagemill_kernels.ranks.places import (
    LOGITS,
    OUTSIDE,
    RECEIVE,
    REPORT,
    SEND,
    STUCK_SECONDS,
    RankStatus,
    place_in_words,
)
from pagemill_kernels.ranks.reduce import REDUCE

_HEAD = struct.Struct("!IIQ")
"""How often all began anew, the step, and the bytes that follow."""
_ENDED_SECONDS = 1.0
_SEND_BYTES = 4 << 20


class Signal(NamedTuple):
    """What a rank says to the others beside values."""

    kind: Literal["failed", "lost", "recovered"]
    epoch: int
    step: int = 0
    reason: str = ""


class _Closed(Exception):
    pass


class _Peer:
    """One rank's connection, with what is on its way in both directions, also across failed steps."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        self.connection, self.file = connection, connection.fileno()
        self.leaving: list[memoryview] = []
        self._head = memoryview(bytearray(_HEAD.size))
        self._num_head = self._num_body = 0
        self._body: memoryview | None = None
        self._is_stale = False

    def give(self, epoch: int, step: int, values: memoryview) -> None:
        self.leaving.append(memoryview(_HEAD.pack(epoch, step & 0xFFFFFFFF, len(values))))
        if len(values):
            self.leaving.append(values)

    def flush(self) -> bool:
        """Send what is possible. Returns whether all is sent."""
        try:
            while self.leaving:
                sent = self.connection.send(self.leaving[0])
                if sent < len(self.leaving[0]):
                    self.leaving[0] = self.leaving[0][sent:]
                else:
                    del self.leaving[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise _Closed from error
        return True

    def take(self, epoch: int, step: int, into: memoryview) -> bool:
        """Receive what has come. Returns whether `into` is full."""
        try:
            while True:
                if self._body is None:
                    self._num_head += self._received(self._head[self._num_head :])
                    if self._num_head < _HEAD.size:
                        continue
                    found, its_step, size = _HEAD.unpack(self._head)
                    self._is_stale = found != epoch
                    if not self._is_stale and (its_step != step & 0xFFFFFFFF or size != len(into)):
                        raise GroupAborted(f"{size} bytes of step {its_step} came for {len(into)} of step {step}")
                    self._body, self._num_body = memoryview(bytearray(size)) if self._is_stale else into, 0
                if self._num_body < len(self._body):
                    self._num_body += self._received(self._body[self._num_body :])
                    continue
                self._body, self._num_head = None, 0
                if not self._is_stale:
                    return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise _Closed from error

    def leave(self) -> None:
        """Let what is still to come go elsewhere than to the caller's memory, which is used again."""
        if self._body is not None and not self._is_stale:
            self._is_stale = True
            self._body = memoryview(bytearray(len(self._body)))

    def _received(self, into: memoryview) -> int:
        count = self.connection.recv_into(into)
        if not count:
            raise _Closed
        return count


def _bytes_of(values: Array) -> memoryview:
    return memoryview(values.reshape(-1).data).cast("B") if values.size else memoryview(b"")


class TcpGroup:
    def __init__(
        self, connections: Mapping[int, socket.socket], rank: int, size: int, members: int,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:  # fmt: skip
        """Join a group. `connections`: to all other ranks. `members`: the ranks of each stage; consecutive ones add
        their sums."""
        self.rank, self.size, self.members, self.stuck_seconds = rank, size, members, stuck_seconds
        self.tell: Callable[[Signal], None] = lambda signal: None
        """Says it to the others; set before anything is exchanged."""
        self.statuses = [RankStatus(0, 0, OUTSIDE, OUTSIDE) for _ in range(size)]
        """What each rank last did; the own one is always true."""
        self.waits_for = [-1] * size
        """The rank that each one waits for; -1: none."""
        self.times = [ComputedTime(0.0, 0)] * size
        """What each rank has computed, as far as it has been reported to this one; on rank 0 of all."""
        self.waited_s = 0.0
        """Seconds in which this rank has exchanged values and waited for others."""
        first = rank - rank % members
        self._stage = range(first, first + members)
        self._peers = {other: _Peer(connection) for other, connection in connections.items()}
        self._given: dict[int, Array] = {}
        self._lock = threading.Condition()
        self._epoch = 0
        self._recovered = [0] * size
        self._failed_step, self._reason, self._is_lost = 0, "", False
        self._woken = os.eventfd(0, os.EFD_NONBLOCK)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._error: BaseException | None = None
        self.context = 0
        self._hook = REDUCE(self._reduce)
        function = ctypes.cast(self._hook, ctypes.c_void_p).value
        assert function is not None
        self.function = function
        """With `context` and `check` the `NativeReduce` of this group."""

    def all_reduce(self, buffer: Array) -> None:
        self._sum(buffer, OUTSIDE, OUTSIDE)

    def gather(self, buffer: Array) -> list[Array]:
        self._at(LOGITS, LOGITS)
        counts = {other: np.empty(1, dtype=np.int64) for other in self._others}
        self._exchange(self._others, np.array([buffer.size], dtype=np.int64), counts)
        found = {other: np.empty(int(count[0]), dtype=np.float32) for other, count in counts.items()}
        self._exchange(self._others, np.ascontiguousarray(buffer), found)
        rows = len(buffer)
        return [buffer if other == self.rank else found[other].reshape(rows, -1) for other in self._stage]

    def send(self, buffer: Array, to: int) -> None:
        self._at(SEND, to)
        self._exchange([to], np.ascontiguousarray(buffer), {})

    def receive(self, buffer: Array, sender: int) -> None:
        self._at(RECEIVE, sender)
        self._exchange([], None, {sender: buffer})

    def give(self, values: Array, to: Sequence[int]) -> None:
        """Give values of any type to some ranks, which `take` them: parts of logits, or what is asked of these."""
        self._at(LOGITS, LOGITS)
        self._exchange(to, values, {})

    def take(self, into: Mapping[int, Array]) -> None:
        self._at(LOGITS, LOGITS)
        self._exchange([], None, into)

    def meet(self, place: int) -> None:
        self._at(place, place)
        nothing = np.empty(0, dtype=np.float32)
        self._exchange(self._others, nothing, dict.fromkeys(self._others, nothing))

    def report(self) -> None:
        self.meet(REPORT)

    def come_to(self, place: int, cut: int | None = None) -> None:
        self._at(place, place if cut is None else cut)

    def status(self, rank: int) -> RankStatus:
        return self.statuses[rank]

    def add_computed(self, seconds: float, steps: int) -> None:
        """Count what this rank has computed, for rank 0 to read."""
        before = self.times[self.rank]
        self.times[self.rank] = ComputedTime(before.seconds + seconds, before.steps + steps)

    def computed(self) -> list[ComputedTime]:
        """Return what each rank has computed; on rank 0, a few tenths of a second old."""
        return list(self.times)

    def begin_step(self, step: int) -> None:
        self.statuses[self.rank] = self.statuses[self.rank]._replace(step=step)

    def place(self, rank: int) -> str:
        return f"at {self.cut(rank)}"

    def cut(self, rank: int) -> str:
        return place_in_words(self.statuses[rank], rank, has_stages=self.members < self.size)

    def abort(self, reason: str) -> None:
        step = self.statuses[self.rank].step
        self._fail(step, reason)
        self.tell(Signal("failed", self._epoch, step, reason))

    def lose(self, reason: str) -> None:
        """End the group for good."""
        with self._lock:
            self._is_lost = True
            self._reason = self._reason or reason
            self._lock.notify_all()
        self._wake()
        os.eventfd_write(self.bell, 1)
        self.tell(Signal("lost", self._epoch, 0, self._reason))

    def hear(self, rank: int, signal: Signal) -> None:
        """Take what another rank says. Called on another thread."""
        if signal.kind == "failed":
            if signal.epoch == self._epoch:
                self._fail(signal.step, signal.reason)
        elif signal.kind == "recovered":
            with self._lock:
                self._recovered[rank] = signal.epoch
                self._lock.notify_all()
        elif not self._is_lost:
            self.lose(signal.reason)

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def reason(self) -> str | None:
        return self._reason or None

    def recover(self) -> None:
        with self._lock:
            self._epoch += 1
            if not self._is_lost:
                self._failed_step, self._reason = 0, ""
        self._error = None
        with suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        self.tell(Signal("recovered", self._epoch))

    def reset(self) -> None:
        """On rank 0: recover, and wait until all other ranks have done so. Raises `GroupAborted`."""
        self.recover()
        with self._lock:
            self._lock.wait_for(lambda: self._is_lost or not self._behind(), self.stuck_seconds)
        missing = self._behind()
        if missing and not self._is_lost:
            self.lose(
                f"rank {missing[0]} has not begun anew within {self.stuck_seconds:g} s; it was last "
                f"{self.place(missing[0])}"
            )
        if self._is_lost:
            raise GroupAborted(self._reason)

    def check(self) -> None:
        """Raise what went wrong in the sums of the layers since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        for peer in self._peers.values():
            peer.connection.close()

    @property
    def _others(self) -> list[int]:
        return [other for other in self._stage if other != self.rank]

    def _behind(self) -> list[int]:
        """Return the ranks that have not begun anew as often as this one."""
        return [rank for rank in self._peers if self._recovered[rank] != self._epoch]

    def _reduce(self, _: object, partial: ctypes._Pointer[ctypes.c_float], count: int, layer: int, cut: int) -> None:
        if self._error is not None:
            return  # the rest of the step is lost
        try:
            self._sum(np.ctypeslib.as_array(partial, (count,)), layer, cut)
        except BaseException as error:
            self._error = error

    def _sum(self, buffer: Array, layer: int, cut: int) -> None:
        self._at(layer, cut)
        given = {other: self._memory(other, buffer.size) for other in self._others}
        own = buffer.reshape(-1)
        self._exchange(self._others, own, given)
        if not given:
            return
        parts = [own if other == self.rank else given[other] for other in self._stage]
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        own[:] = total

    def _memory(self, other: int, size: int) -> Array:
        held = self._given.get(other)
        if held is None or len(held) < size:
            held = self._given[other] = np.empty(size, dtype=np.float32)
        return held[:size]

    def _at(self, layer: int, cut: int) -> None:
        own = self.statuses[self.rank]
        self.statuses[self.rank] = RankStatus(own.barriers + 1, own.step, layer, cut)

    def _exchange(self, to: Sequence[int], values: Array | None, into: Mapping[int, Array]) -> None:
        """Send the same values to some ranks, and fill arrays from others."""
        self._raise_if_ended()
        began_s = time.monotonic()
        epoch, step = self._epoch, self.statuses[self.rank].step
        sending = {other: self._peers[other] for other in to}
        taking = {other: _bytes_of(each) for other, each in into.items()}
        for peer in sending.values():
            assert values is not None
            peer.give(epoch, step, _bytes_of(values))
        try:
            while True:
                for other, peer in list(sending.items()):
                    if self._done(other, peer.flush):
                        del sending[other]
                for other, target in list(taking.items()):
                    if self._done(other, self._peers[other].take, epoch, step, target):
                        del taking[other]
                if not sending and not taking:
                    return
                self.waits_for[self.rank] = next(iter(taking or sending))
                self._wait(sending, taking)
                self._raise_if_ended()
        except GroupAborted:
            for other in into:
                self._peers[other].leave()
            raise
        finally:
            self.waits_for[self.rank] = -1
            self.waited_s += time.monotonic() - began_s

    def _done(self, other: int, run: Callable[..., bool], *given: Any) -> bool:
        try:
            return run(*given)
        except _Closed as error:
            with self._lock:  # who watches the process says more
                self._lock.wait_for(lambda: self._is_lost or bool(self._reason), _ENDED_SECONDS)
            self._raise_if_ended()
            raise GroupAborted(f"rank {other} has ended its connection") from error

    def _wait(self, sending: Mapping[int, _Peer], taking: Mapping[int, memoryview]) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        for other in {*sending, *taking}:
            events = (select.POLLOUT if other in sending else 0) | (select.POLLIN if other in taking else 0)
            poll.register(self._peers[other].file, events)
        poll.poll()

    def _raise_if_ended(self) -> None:
        if self._is_lost or (self._reason and self.statuses[self.rank].step >= self._failed_step):
            raise GroupAborted(self._reason)

    def _fail(self, step: int, reason: str) -> None:
        with self._lock:
            self._failed_step = min(self._failed_step, step) if self._reason else step
            self._reason = self._reason or reason
            self._lock.notify_all()
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)
