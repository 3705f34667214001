"""A group of the host for models that torch runs on the CPU: tensors are exchanged as the arrays over their memory."""

from __future__ import annotations

from torch import Tensor

from pagemill_kernels.arrays import Array
from pagemill_kernels.ranks.group import RankGroup
from pagemill_kernels.torch_arrays import from_torch, to_torch


class HostTensorGroup:
    def __init__(self, group: RankGroup[Array]) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group

    def all_reduce(self, buffer: Tensor) -> None:
        self._group.all_reduce(from_torch(buffer))

    def gather(self, buffer: Tensor) -> list[Tensor]:
        return [to_torch(each) for each in self._group.gather(from_torch(buffer))]

    def send(self, buffer: Tensor, to: int) -> None:
        self._group.send(from_torch(buffer), to)

    def receive(self, buffer: Tensor, sender: int) -> None:
        self._group.receive(from_torch(buffer), sender)

    def abort(self, reason: str) -> None:
        self._group.abort(reason)
