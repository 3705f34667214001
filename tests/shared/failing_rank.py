"""A follower's process that fails at one place: how, at which step and where stands in its environment.

`FailingGroup` does the same for rank 0, in this process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any, NamedTuple

import msgspec

from pagemill_execution.starting import rank_process
from pagemill_kernels.arrays import Array
from pagemill_kernels.ranks import reduce
from pagemill_kernels.ranks.places import LOGITS, PLAN
from pagemill_kernels.ranks.shared_memory import SharedMemoryGroup

VARIABLE = "FAILING_RANK"
STUCK_S = 3.0
"""When a rank counts as stuck: longer than one waits for a processor on a busy machine."""


class Failure(NamedTuple):
    rank: int
    how: str
    """`kill`, `stop`, `raise`, or `wait`: for some time at every place."""
    place: str = ""
    """As messages name it."""
    step: int = 0
    """The first step that fails. `raise`: the only one."""
    seconds: float = 0.0

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


class FailingGroup(SharedMemoryGroup):
    failures: tuple[Failure, ...] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._at_step = 0
        self._raised: set[Failure] = set()
        self._error: Exception | None = None
        self._hook = reduce.REDUCE(self._reduce)
        function = ctypes.cast(self._hook, ctypes.c_void_p).value
        assert function is not None
        self.function = function

    def begin_step(self, step: int) -> None:
        self._at_step = step
        super().begin_step(step)

    def come_to(self, place: int) -> None:
        super().come_to(place)
        if place == PLAN:
            self._fail_at("the plan ring")

    def report(self) -> None:
        self._fail_at("the end")
        super().report()

    def all_reduce(self, buffer: Array) -> None:
        self._fail_at("a sum outside of the layers")
        super().all_reduce(buffer)

    def gather(self, buffer: Array) -> list[Array]:
        self._fail_at("the logits")
        return super().gather(buffer)

    def meet(self, place: int) -> None:
        if place == LOGITS:
            self._fail_at("the logits")
        super().meet(place)

    def send(self, buffer: Array, to: int) -> None:
        self._fail_at(f"hidden states from rank {self.rank} to {to}")
        super().send(buffer, to)

    def receive(self, buffer: Array, sender: int) -> None:
        self._fail_at(f"hidden states from rank {sender} to {self.rank}")
        super().receive(buffer, sender)

    def check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        super().check()

    def _reduce(self, _: object, partial: Any, count: int, layer: int, cut: int) -> None:
        try:
            stage = "" if self.members == self.size else " of its stage"
            self._fail_at(f"cut {cut} of layer {layer}{stage}")
        except MemoryError as error:
            self._error = error
            self.abort(f"rank {self.rank} {self.place(self.rank)}: {error}")
        self._native.pagemill_ranks_hook(self.context, ctypes.cast(partial, ctypes.c_void_p), count, layer, cut)

    def _fail_at(self, place: str) -> None:
        for failure in self.failures:
            if failure.rank != self.rank or self._at_step < failure.step or failure in self._raised:
                continue
            if failure.how == "wait":
                time.sleep(failure.seconds)  # this rank is slow; nothing is awaited by it
            elif failure.place == place:
                if failure.how == "raise":
                    self._raised.add(failure)
                    raise MemoryError(f"no memory at {place}")
                os.kill(os.getpid(), signal.SIGKILL if failure.how == "kill" else signal.SIGSTOP)


def main() -> None:
    FailingGroup.failures = msgspec.json.decode(os.environ[VARIABLE], type=tuple[Failure, ...])
    rank_process.SharedMemoryGroup = FailingGroup  # type: ignore[misc, attr-defined]
    rank_process.main()


if __name__ == "__main__":
    main()
