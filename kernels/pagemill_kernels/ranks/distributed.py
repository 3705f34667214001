"""A group of ranks by torch.distributed, for tensors: gloo on the CPU and over nodes, NCCL between NVIDIA devices.

Sums are gathered and added in the order of ranks, as in every group, so that all ranks have the same bits. The library
wakes no rank that waits: others find an ended group after the process group's own timeout, with the reason from the
store.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pagemill_kernels.ranks.group import GroupAborted

_REASON = "pagemill-reason"


class DistributedGroup:
    def __init__(self, group: Any, store: Any) -> None:
        """Wrap a process group. `group`: one with torch's interface of backends, such as `ProcessGroupGloo`. `store`:
        that all ranks share."""
        self.rank, self.size = group.rank(), group.size()
        self._group, self._store = group, store

    def all_reduce(self, buffer: Tensor) -> None:
        given = [torch.empty_like(buffer) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([given], [buffer]))
        total = given[0]
        for each in given[1:]:
            total += each
        buffer.copy_(total)

    def gather(self, buffer: Tensor) -> list[Tensor]:
        size = torch.tensor([buffer.numel()], device=buffer.device)
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([sizes], [size]))
        counts = [int(each) for each in sizes]
        padded = torch.zeros(max(counts), dtype=buffer.dtype, device=buffer.device)
        padded[: buffer.numel()] = buffer.flatten()
        given = [torch.empty_like(padded) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([given], [padded]))
        return [each[:count].view(len(buffer), -1) for each, count in zip(given, counts, strict=True)]

    def send(self, buffer: Tensor, to: int) -> None:
        self._run(lambda: self._group.send([buffer], to, 0))

    def receive(self, buffer: Tensor, sender: int) -> None:
        self._run(lambda: self._group.recv([buffer], sender, 0))

    def abort(self, reason: str) -> None:
        self._store.compare_set(_REASON, "", reason)

    def reason(self) -> str | None:
        """Return why the group has ended; None while it has not."""
        if not self._store.check([_REASON]):
            return None
        found: bytes = self._store.get(_REASON)
        return found.decode()

    def _run(self, start: Callable[[], Any]) -> None:
        if (reason := self.reason()) is not None:
            raise GroupAborted(reason)
        try:
            start().wait()
        except RuntimeError as error:
            self.abort(f"rank {self.rank}: {error}")
            raise GroupAborted(self.reason() or str(error)) from error


def gloo_group(store: Any, rank: int, size: int, address: str, seconds: float) -> DistributedGroup:
    """Return a group of the CPU. `address`: of this machine, for the others. `seconds`: how long others are waited
    for."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=seconds)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    prefixed = dist.PrefixStore("gloo", store)  # type: ignore[attr-defined]
    return DistributedGroup(dist.ProcessGroupGloo(prefixed, rank, size, options), store)
