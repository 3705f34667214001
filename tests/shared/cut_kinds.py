"""Gives a scheduler fewer blocks than a runner's cache has, without blocks of two kinds in the same bytes."""

from __future__ import annotations

from pagemill_execution.runners.base import RunnerInfo


def with_blocks(info: RunnerInfo, num_blocks: int) -> RunnerInfo:
    """Return what a runner with about `num_blocks` blocks of each kind would say.

    Where two kinds share memory, the last one's blocks end at the end of the memory, and their ids say how far: by
    whole blocks. With other counts the scheduler finds another end, a whole number of blocks before the runner's one
    only if what is left over is not more than the runner has left over.
    """
    counts = [min(each, num_blocks) for each in info.kind_blocks]
    if info.shares_memory and counts:
        low, high = info.kinds[0].block_bytes, info.kinds[-1].block_bytes
        left = info.kind_blocks[0] * low % high
        fitting = [count for count in range(1, info.kind_blocks[0] + 1) if count * low % high <= left]
        counts[0] = min(fitting, key=lambda count: abs(count - num_blocks))
    return info._replace(num_blocks=counts[0] if counts else num_blocks, kind_blocks=tuple(counts))
