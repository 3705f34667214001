"""A group of ranks by torch.distributed, for tensors of devices: NCCL between NVIDIA devices, gloo on the CPU.

Sums are gathered and added in the order of ranks, as in every group. Between devices they go through torch's symmetric
memory where there is some, and larger ones through NCCL's own sum, which adds in one order for all ranks as well: all
have the same bits. Operations only queue work for a device, so that CUDA graphs can record them.

Neither library ends an exchange in which another rank is missing. A rank says before each one that it comes to it, and
looks, while it waits on the host, whether the group has ended; who waits for a device does the same (`wait_for`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pagemill_kernels.ranks.group import GroupAborted

ONE_SHOT_VALUES = 1 << 18
"""Sums of at most so many values (1 MiB) go through symmetric memory: of more, reading all of every other rank takes
longer than NCCL's rings."""
_ENDED_SECONDS = 1.0
"""How long a rank whose exchange failed waits for the name of the one that ended."""
_LONGEST_SLEEP_S = 0.001


class ExchangeSignals(Protocol):
    """What a rank says beside values, and what it hears of others."""

    def come(self) -> None:
        """Say that this rank comes to its next exchange."""
        ...

    def leave(self) -> None:
        """Say that the exchange is over."""
        ...

    def look(self) -> None:
        """Raise `GroupAborted` if the ranks compute nothing more together. Called while this rank waits."""
        ...


class OneShotSums:
    """Sums over memory of all ranks that each one's device reads: one copy there, and one sum here."""

    def __init__(self, of_ranks: Sequence[Tensor], rank: int, meet: Callable[[int], None]) -> None:
        """`of_ranks`: the memory of each rank, float32. `meet`: queues a barrier of all ranks, one of two."""
        self._of_ranks, self._own, self._meet = of_ranks, of_ranks[rank], meet
        self.capacity = len(self._own)

    def add(self, buffer: Tensor) -> None:
        """Replace values by the sums over all ranks, in their order. At most `capacity` of them."""
        values, count = buffer.view(-1), buffer.numel()
        self._own[:count].copy_(values)
        self._meet(0)
        torch.add(self._of_ranks[0][:count], self._of_ranks[1][:count], out=values)
        for other in self._of_ranks[2:]:
            values += other[:count]
        self._meet(1)  # no rank writes its next values while another one reads these


class DistributedGroup:
    def __init__(self, group: Any, signals: ExchangeSignals, *, on_host: bool, sums: OneShotSums | None = None) -> None:
        """Wrap a process group. `group`: one with torch's interface of backends, such as `ProcessGroupGloo`.
        `on_host`: whether its exchanges are done by the host, and not queued for a device."""
        self.rank, self.size = group.rank(), group.size()
        self._group, self._signals, self._sums, self._on_host = group, signals, sums, on_host
        self._widths: dict[int, list[int]] = {}
        """Columns of all ranks in `gather`, by this one's: they cannot be exchanged while a graph is recorded."""

    def all_reduce(self, buffer: Tensor) -> None:
        if self._sums is not None and buffer.numel() <= self._sums.capacity:
            self._signals.come()
            self._sums.add(buffer)
            self._signals.leave()
        elif self._on_host:
            first, *others = self.gather_alike(buffer)
            for each in others:
                first += each
            buffer.copy_(first)
        else:
            self._run(lambda: self._group.allreduce([buffer]))

    def gather(self, buffer: Tensor) -> list[Tensor]:
        rows, own = buffer.shape
        if own not in self._widths:
            self._widths[own] = [int(each) for each in self.gather_alike(torch.tensor([own], device=buffer.device))]
        widths = self._widths[own]
        padded = torch.zeros(rows, max(widths), dtype=buffer.dtype, device=buffer.device)
        padded[:, :own] = buffer
        return [each[:, :width] for each, width in zip(self.gather_alike(padded), widths, strict=True)]

    def gather_alike(self, buffer: Tensor) -> Tensor:
        """Return what all ranks give, of the same shape, [ranks, ...]."""
        given = torch.empty(self.size, *buffer.shape, dtype=buffer.dtype, device=buffer.device)
        parts = list(given)
        self._run(lambda: self._group.allgather([parts], [buffer]))
        return given

    def add_integers(self, buffer: Tensor) -> None:
        """Replace integers by their sums over all ranks, which have no order."""
        self._run(lambda: self._group.allreduce([buffer]))

    def broadcast(self, buffer: Tensor, sender: int) -> None:
        """Fill `buffer` on all ranks with what is in it on one of them."""
        options = dist.BroadcastOptions()
        options.rootRank = sender
        self._run(lambda: self._group.broadcast([buffer], options))

    def send(self, buffer: Tensor, to: int) -> None:
        assert self.size == 2, "hidden states go through groups of a pair"
        self.broadcast(buffer, self.rank)

    def receive(self, buffer: Tensor, sender: int) -> None:
        assert self.size == 2, "hidden states go through groups of a pair"
        self.broadcast(buffer, sender)

    def abort(self, reason: str) -> None:
        """Do nothing: the rank's `ExchangeSignals` end the group."""

    def _run(self, start: Callable[[], Any]) -> None:
        self._signals.come()
        try:
            work = start()
            if self._on_host:
                wait_for(work.is_completed, self._signals.look)
            work.wait()  # of NCCL's work only the stream waits
            self._signals.leave()
        except GroupAborted:
            raise
        except RuntimeError as error:
            deadline = time.monotonic() + _ENDED_SECONDS
            while time.monotonic() < deadline:  # who watches the processes says more
                self._signals.look()
                time.sleep(_LONGEST_SLEEP_S)
            raise GroupAborted((str(error).splitlines() or ["an exchange failed"])[0]) from error


def wait_for(is_done: Callable[[], bool], look: Callable[[], None]) -> None:
    """Wait until work is done. `look` is called meanwhile and may raise."""
    pause_s = 0.0
    while not is_done():
        look()
        time.sleep(pause_s)
        pause_s = min(_LONGEST_SLEEP_S, pause_s + 1e-6)


class Meeting:
    """Where the ranks of one engine find each other, and the groups that they make there."""

    def __init__(self, address: str, port: int | None, seconds: float) -> None:
        """Connect to rank 0's store. `port`: where it listens; None: this is rank 0, and listens at a free port.
        `seconds`: how long ranks wait for each other. Raises `OSError` and RuntimeError."""
        self._limit = timedelta(seconds=seconds)
        listening = None
        if port is None:
            import socket

            with socket.create_server((address, 0)) as server:  # torch itself would listen everywhere
                port, listening = server.getsockname()[1], server.detach()
        self.address, self.port = address, port
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, None, listening is not None, self._limit, wait_for_workers=False, master_listen_fd=listening
        )

    def join(self, rank: int, size: int, device: torch.device, look: Callable[[], None]) -> None:
        """Make the group of all ranks. Every rank calls this and then `group` with the same ranks in the same order.
        `look`: is called while others are missing. Raises RuntimeError."""
        self._each(f"rank {rank}", "comes", [f"rank {other}" for other in range(size)], look)
        is_host = device.type == "cpu"
        dist.init_process_group(
            "gloo" if is_host else "nccl", store=self._store, rank=rank, world_size=size, timeout=self._limit,
            device_id=None if is_host else device,
        )  # fmt: skip

    def least(self, rank: int, size: int, value: int, look: Callable[[], None]) -> int:
        """Return the least of what all ranks give; each gives one value. `look`: is called while others are missing."""
        names = [f"value {other}" for other in range(size)]
        self._each(names[rank], str(value), names, look)
        return min(int(self._store.get(name)) for name in names)

    def _each(self, own: str, value: str, names: list[str], look: Callable[[], None]) -> None:
        """Set an entry of the store, and wait until all have one."""
        deadline = time.monotonic() + self._limit.total_seconds()
        self._store.set(own, value)

        def looked() -> None:
            look()
            if time.monotonic() > deadline:
                missing = next(name for name in names if not self._store.check([name]))
                raise RuntimeError(f"there was no {missing} within {self._limit.total_seconds():g} s")

        wait_for(lambda: self._store.check(names), looked)

    def group(self, ranks: Sequence[int], signals: ExchangeSignals, one_shot_on: torch.device | None = None) -> Any:
        """Return this rank's end of a group of some ranks; None if it is not one of them. `one_shot_on`: the device
        of this rank, if those of all of them may read each other's memory."""
        own = dist.get_rank()
        found: Any = dist.new_group(list(ranks), timeout=self._limit)
        if own not in ranks:
            return None
        on_host = dist.get_backend(found) == "gloo"
        sums = None if on_host or one_shot_on is None or len(ranks) == 1 else _symmetric_sums(found, one_shot_on)
        return DistributedGroup(found, signals, on_host=on_host, sums=sums)

    def abort(self) -> None:
        """End what devices wait for, so that this process can end."""
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        self.abort()  # what destroys NCCL's groups waits for ranks that may have ended
        if dist.is_initialized():
            dist.destroy_process_group()


def _symmetric_sums(group: Any, device: torch.device) -> OneShotSums | None:
    """Return sums by torch's symmetric memory; None, on all ranks alike, where one of them cannot."""
    import torch.distributed._symmetric_memory as symmetric

    handle: Any = None
    try:
        own = symmetric.empty(ONE_SHOT_VALUES, dtype=torch.float32, device=device)
        handle = symmetric.rendezvous(own, group)
    except RuntimeError:
        pass
    have_all = torch.tensor([handle is not None], dtype=torch.int32, device=device)
    dist.all_reduce(have_all, dist.ReduceOp.MIN, group=group)
    if not have_all.item():
        return None
    of_ranks = [handle.get_buffer(rank, (ONE_SHOT_VALUES,), torch.float32) for rank in range(group.size())]
    return OneShotSums(of_ranks, group.rank(), handle.barrier)
