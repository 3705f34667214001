"""Groups by torch.distributed give what groups of threads give: by gloo everywhere, by NCCL where there are GPUs."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_process_ranks import in_process_groups
from rank_threads import together

from pagemill_execution.runners.torch_model import HostTensorGroup
from pagemill_kernels.ranks.distributed import DistributedGroup, Meeting, OneShotSums
from pagemill_kernels.ranks.group import GroupAborted

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")


class Signals:
    """Of ranks that are threads, and share the reason for which they end."""

    def __init__(self, ended: list[str]) -> None:
        self.num_exchanges, self._ended = 0, ended

    def come(self) -> None:
        self.num_exchanges += 1

    def leave(self) -> None:
        pass

    def look(self) -> None:
        if self._ended:
            raise GroupAborted(self._ended[0])


def gloo_groups(size: int, ended: list[str] | None = None) -> list[DistributedGroup]:
    store = dist.HashStore()
    made: dict[int, DistributedGroup] = {}

    def join(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=60)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(store, rank, size, options)
        made[rank] = DistributedGroup(group, Signals(ended if ended is not None else []), on_host=True)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [made[rank] for rank in range(size)]


def exchange(group: Any) -> list[torch.Tensor]:
    own = torch.randn(700, generator=torch.Generator().manual_seed(group.rank))
    group.all_reduce(own)
    gathered = [
        each for rows in (3, 2) for each in group.gather(torch.full((rows, 4 + group.rank), float(group.rank + rows)))
    ]
    return [own, *gathered]


def test_gloo_gives_the_bits_of_threads() -> None:
    threads = [HostTensorGroup(group) for group in in_process_groups(3)]
    for mine, other in zip(together(gloo_groups(3), exchange), together(threads, exchange), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))


def test_one_rank_sends_to_all_and_hidden_states_go_to_the_other_of_a_pair() -> None:
    def run(group: DistributedGroup) -> torch.Tensor:
        token_ids = torch.full((5,), 7 + group.rank)
        group.broadcast(token_ids, 1)
        if group.size == 2:
            hidden = torch.full((2, 3), 1.0 + group.rank, dtype=torch.bfloat16)
            (group.send if group.rank == 1 else group.receive)(hidden, 1 - group.rank)
            assert hidden.tolist() == [[2.0] * 3] * 2
        return token_ids

    for size in (2, 3):
        assert all(each.tolist() == [8] * 5 for each in together(gloo_groups(size), run))


def test_a_rank_that_waits_finds_that_the_group_has_ended() -> None:
    ended: list[str] = []

    def run(group: Any) -> None:
        if group.rank == 1:
            ended.append("rank 1: out of memory")
        else:
            group.all_reduce(torch.ones(4))

    first, second, third = together(gloo_groups(3, ended), run)
    assert second is None
    assert isinstance(first, GroupAborted)
    assert str(first) == str(third) == "rank 1: out of memory"


def test_sums_over_memory_of_all_ranks_are_added_in_their_order() -> None:
    """As devices do by symmetric memory, many times, with ranks that are ahead of others."""
    barrier, of_ranks = threading.Barrier(3), [torch.zeros(64) for _ in range(3)]
    threads = [HostTensorGroup(group) for group in in_process_groups(3)]
    sums = [OneShotSums(of_ranks, rank, lambda _: barrier.wait(60)) for rank in range(3)]

    def run(rank: int, add: Any) -> list[torch.Tensor]:
        generator, found = torch.Generator().manual_seed(rank), []
        for number in range(50):
            own = torch.randn(64 - number, generator=generator)
            add(own)
            found.append(own)
        return found

    found = together(threads, lambda group: run(group.rank, sums[group.rank].add))
    expected = together(threads, lambda group: run(group.rank, group.all_reduce))
    for mine, other in zip(found, expected, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))


def test_ranks_that_meet_agree_on_the_least_and_name_one_that_is_missing() -> None:
    first = Meeting("127.0.0.1", None, 20.0)
    second = Meeting("127.0.0.1", first.port, 20.0)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(second.least(1, 2, 70, lambda: None)))
    thread.start()
    assert first.least(0, 2, 64, lambda: None) == 64
    thread.join(20)
    assert found == [64]

    def look() -> None:
        raise GroupAborted("rank 2 has ended")

    with pytest.raises(GroupAborted, match="rank 2 has ended"):
        first.least(0, 3, 64, look)
    alone = Meeting("127.0.0.1", None, 0.05)
    with pytest.raises(RuntimeError, match=r"there was no value 1 within 0.05 s"):
        alone.least(0, 2, 64, lambda: None)


@pytest.mark.gpu
def test_nccl_adds_within_a_cuda_graph() -> None:
    """With the one rank that a machine with one GPU has room for: sums over several GPUs are unproven."""
    device, signals = torch.device("cuda", 0), Signals([])
    meeting = Meeting("127.0.0.1", None, 60.0)
    meeting.join(0, 1, device, signals.look)
    try:
        group = meeting.group([0], signals, device)
        values = torch.ones(1024, device=device)
        group.all_reduce(values)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            group.all_reduce(values)
            group.broadcast(values, 0)
        values.fill_(3.0)
        graph.replay()
        torch.cuda.synchronize()
        assert values.tolist() == [3.0] * 1024
        assert signals.num_exchanges == 3, "a replay says nothing"
    finally:
        meeting.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU")
def test_two_gpus_add_in_the_order_of_ranks(tmp_path: Path) -> None:
    """By symmetric memory where there is some, and larger sums by NCCL, of which only equal bits are expected."""
    code = (
        "import sys, torch\n"
        "from pagemill_kernels.ranks.distributed import Meeting, ONE_SHOT_VALUES\n"
        "class Signals:\n    def come(self): pass\n    def leave(self): pass\n    def look(self): pass\n"
        "rank, port = int(sys.argv[1]), int(sys.argv[2])\n"
        "device = torch.device('cuda', rank); torch.cuda.set_device(device)\n"
        "meeting = Meeting('127.0.0.1', port or None, 60.0)\n"
        "print(meeting.port, flush=True)\n"
        "meeting.join(rank, 2, device, lambda: None)\n"
        "group = meeting.group([0, 1], Signals(), device)\n"
        "for count in (4096, 2 * ONE_SHOT_VALUES):\n"
        "    given = [torch.arange(count, device=device) * 0.37 + each for each in (0, 1)]\n"
        "    own = given[rank].clone(); group.all_reduce(own)\n"
        "    assert torch.equal(own, given[0] + given[1])\n"
    )
    script = tmp_path / "rank.py"
    script.write_text(code)
    first = subprocess.Popen([sys.executable, str(script), "0", "0"], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    port = first.stdout.readline().strip()
    subprocess.run([sys.executable, str(script), "1", port], check=True, timeout=120)
    assert first.wait(120) == 0
