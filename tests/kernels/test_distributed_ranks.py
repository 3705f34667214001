"""Groups by torch.distributed (gloo) give what groups of threads give."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_threads import together

from pagemill_engine.executing.torch_model import HostTensorGroup
from pagemill_kernels.ranks.distributed import DistributedGroup, gloo_group
from pagemill_kernels.ranks.group import GroupAborted
from pagemill_kernels.ranks.in_process import in_process_groups

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")


def gloo_groups(size: int, seconds: float = 30.0) -> list[DistributedGroup]:
    store = dist.HashStore()
    made: dict[int, DistributedGroup] = {}

    def join(rank: int) -> None:
        made[rank] = gloo_group(store, rank, size, "127.0.0.1", seconds)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [made[rank] for rank in range(size)]


def exchange(group: Any) -> list[torch.Tensor]:
    own = torch.randn(700, generator=torch.Generator().manual_seed(group.rank))
    group.all_reduce(own)
    gathered = group.gather(torch.full((3, 4 + group.rank), float(group.rank)))
    if group.rank == 0:
        group.send(own * 2, 2)
    received = torch.zeros(700)
    if group.rank == 2:
        group.receive(received, 0)
    return [own, *gathered, received]


def test_gloo_gives_the_bits_of_threads() -> None:
    threads = [HostTensorGroup(group) for group in in_process_groups(3)]
    for mine, other in zip(together(gloo_groups(3), exchange), together(threads, exchange), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))


@pytest.mark.slow
def test_a_rank_that_does_not_come_ends_the_group_after_the_timeout() -> None:
    def run(group: Any) -> None:
        if group.rank != 1:
            group.all_reduce(torch.ones(4))

    first, second, third = together(gloo_groups(3, seconds=3.0), run)
    assert second is None
    assert isinstance(first, GroupAborted)
    assert str(first) == str(third)


def test_an_aborted_group_raises_the_first_reason() -> None:
    groups = gloo_groups(2)
    groups[1].abort("rank 1: out of memory")
    groups[0].abort("a later reason")
    for group in groups:
        with pytest.raises(GroupAborted, match="rank 1: out of memory"):
            group.all_reduce(torch.ones(4))
