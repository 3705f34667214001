"""A group of processes of one machine over shared memory, without torch (cpu/src/ranks.cpp).

A rank that waits too long for another one ends the group for all and names it; who watches processes calls `lose`.
"""

from __future__ import annotations

import ctypes

import numpy as np

from pagemill_kernels.arrays import Array, address
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.ranks.group import ComputedTime, GroupAborted
from pagemill_kernels.ranks.memory import SharedMemory
from pagemill_kernels.ranks.places import OUTSIDE, REPORT, STUCK_SECONDS, RankStatus, place_in_words

_REASON_BYTES = 512


class _Time(ctypes.Structure):
    """`ComputedTime` of a rank, in the memory behind what the native code uses."""

    _fields_ = (("seconds", ctypes.c_double), ("steps", ctypes.c_int64))


def group_bytes(size: int, capacity: int, members: int | None = None) -> int:
    """Return the bytes of the shared memory of a group. `capacity`: values that are exchanged at a time. `members`: the
    ranks of a stage; None: all."""
    return _times_at(size, capacity, members) + size * ctypes.sizeof(_Time)


def _times_at(size: int, capacity: int, members: int | None) -> int:
    used = int(launch.native().pagemill_ranks_bytes(size, members or size, capacity))
    return -(-used // ctypes.alignment(_Time)) * ctypes.alignment(_Time)


class SharedMemoryGroup:
    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        size: int,
        capacity: int,
        stuck_seconds: float = STUCK_SECONDS,
        members: int | None = None,
    ) -> None:
        """Join a group. `memory`: of at least `group_bytes`. `stuck_seconds`: how long another rank is waited for that
        comes to no further cut.

        `members`: the ranks of each stage; consecutive ones add their sums. None: all ranks are one stage.
        """
        self.rank, self.size = rank, size
        self.members = members or size
        self._memory = memory
        self._stuck_seconds = stuck_seconds
        self._native = launch.native()
        self._ranks = library.Ranks(
            shared=memory.address,
            capacity=capacity,
            size=size,
            rank=rank,
            first=rank - rank % self.members,
            members=self.members,
            stuck_ms=int(stuck_seconds * 1000),
        )
        self._times = (_Time * size).from_address(memory.address + _times_at(size, capacity, self.members))
        self.context = ctypes.addressof(self._ranks)
        function = ctypes.cast(self._native.pagemill_ranks_hook, ctypes.c_void_p).value
        assert function is not None
        self.function = function
        """With `context` and `check` the `NativeReduce` of this group."""

    def all_reduce(self, buffer: Array) -> None:
        self._native.pagemill_ranks_reduce(self._ranks, address(buffer), buffer.size, OUTSIDE, OUTSIDE)
        self.check()

    def gather(self, buffer: Array) -> list[Array]:
        counts = np.empty(self.members, dtype=np.int64)
        self._native.pagemill_ranks_counts(self._ranks, buffer.size, address(counts))
        self.check()
        found = np.empty(int(counts.sum()), dtype=np.float32)
        self._native.pagemill_ranks_gather(self._ranks, address(buffer), address(counts), address(found))
        self.check()
        rows = len(buffer)
        return [each.reshape(rows, -1) for each in np.split(found, np.cumsum(counts)[:-1])]

    def send(self, buffer: Array, to: int) -> None:
        self._native.pagemill_ranks_send(self._ranks, address(buffer), buffer.size, to)
        self.check()

    def receive(self, buffer: Array, sender: int) -> None:
        self._native.pagemill_ranks_receive(self._ranks, address(buffer), buffer.size, sender)
        self.check()

    def abort(self, reason: str) -> None:
        """End what all ranks compute from this rank's step on. `recover` and `reset` let them begin anew, unless the
        group is lost."""
        # A C string that is cut inside a character is read with a replacement.
        self._native.pagemill_ranks_abort(self._ranks, reason.encode(), False)

    def lose(self, reason: str) -> None:
        """End the group for good."""
        self._native.pagemill_ranks_abort(self._ranks, reason.encode(), True)

    @property
    def is_lost(self) -> bool:
        return bool(self._native.pagemill_ranks_lost(self._ranks))

    def recover(self) -> None:
        """Forget a failed step; every rank calls this, outside of any exchange."""
        self._native.pagemill_ranks_recover(self._ranks)

    def reset(self) -> None:
        """On rank 0: recover, wait until all other ranks have done so, and begin anew. Raises `GroupAborted`."""
        self.recover()
        if not self._native.pagemill_ranks_reset(self._ranks):
            missing = self._ranks.missing
            self.lose(
                f"rank {missing} has not begun anew within {self._stuck_seconds:g} s; it was last {self.place(missing)}"
            )
            raise GroupAborted(self.reason() or "the group is lost")

    def check(self) -> None:
        """Raise `GroupAborted` if the group has ended, or if this rank has waited too long and so ends it."""
        if not self._ranks.failed:
            return
        if self._ranks.failed == 2:
            self.lose(self._missing(self._ranks.missing))
        raise GroupAborted(self.reason() or "the group has ended")

    def reason(self) -> str | None:
        """Return why the group has ended; None while it has not."""
        text = ctypes.create_string_buffer(_REASON_BYTES)
        found = self._native.pagemill_ranks_reason(self._ranks, text, _REASON_BYTES)
        return text.value.decode(errors="replace") if found else None

    def begin_step(self, step: int) -> None:
        """Record the number of the step that this rank computes, for messages."""
        self._native.pagemill_ranks_step(self._ranks, step)

    def report(self) -> None:
        """Wait until all members have computed the step. Raises `GroupAborted`, as every exchange."""
        self.meet(REPORT)

    def meet(self, place: int) -> None:
        """Wait until all members have come to a place outside of the layers. Raises `GroupAborted`."""
        self._native.pagemill_ranks_meet(self._ranks, place)
        self.check()

    def come_to(self, place: int, cut: int | None = None) -> None:
        """Record that this rank is at a place outside of the layers, for messages. `cut`: the number of an exchange."""
        self._native.pagemill_ranks_at(self._ranks, place, place if cut is None else cut)

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank has waited for others."""
        return float(self._ranks.waited_ns) / 1e9

    def add_computed(self, seconds: float, steps: int) -> None:
        """Count what this rank has computed, for all ranks to read."""
        own = self._times[self.rank]
        own.seconds += seconds
        own.steps += steps

    def computed(self) -> list[ComputedTime]:
        """Return what each rank has computed."""
        return [ComputedTime(each.seconds, each.steps) for each in self._times]

    def status(self, rank: int) -> RankStatus:
        out = (ctypes.c_int64 * 4)()
        self._native.pagemill_ranks_status(self._ranks, rank, out)
        return RankStatus(*out)

    def place(self, rank: int) -> str:
        """Return where a rank was last, for messages."""
        return f"at {self._cut(rank)}"

    def _missing(self, rank: int) -> str:
        return (
            f"rank {rank} has not reached {self._cut(self.rank)} within {self._stuck_seconds:g} s; "
            f"it was last {self.place(rank)}"
        )

    def _cut(self, rank: int) -> str:
        return place_in_words(self.status(rank), rank, has_stages=self.members < self.size)
