"""The interface of a group of ranks."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

Buffer = TypeVar("Buffer")
"""What is exchanged: float32 arrays of the host, or tensors of a device."""


class GroupAborted(RuntimeError):
    """The group exchanges nothing more; the message says which rank ended it and why."""


class ComputedTime(NamedTuple):
    """What a rank has computed since its start."""

    seconds: float
    """Without the time in which it has waited for other ranks."""
    steps: int


class RankGroup(Protocol[Buffer]):
    """One rank's end of a group. All ranks call the same operations in the same order."""

    rank: int
    size: int

    def all_reduce(self, buffer: Buffer) -> None:
        """Replace float32 values by the sums over all ranks, added in the order of ranks: every rank gets the same
        bits. `buffer`: contiguous. Raises `GroupAborted`."""
        ...

    def gather(self, buffer: Buffer) -> list[Buffer]:
        """Return what each rank has given, in the order of ranks; sizes may differ. Raises `GroupAborted`."""
        ...

    def send(self, buffer: Buffer, to: int) -> None:
        """Give values to one rank, which calls `receive`. Raises `GroupAborted`."""
        ...

    def receive(self, buffer: Buffer, sender: int) -> None:
        """Fill `buffer` with what a rank sends. Raises `GroupAborted`."""
        ...

    def abort(self, reason: str) -> None:
        """End the group for all ranks; the first reason counts."""
        ...
