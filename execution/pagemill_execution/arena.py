"""The memory that two cache kinds share: where their blocks are in it.

The block manager (`pagemill_engine.kv.split`) moves the border between them, runners make the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagemill_protocol.report.cache_kinds import CacheKind


class Arena(NamedTuple):
    """Where the blocks of two kinds are in the memory that they share. The padding blocks are behind it."""

    num_bytes: int
    """Of the arena and the padding blocks: whole blocks of the first kind."""
    start: int
    """Bytes before the last kind's block of id 0."""
    padding_blocks: tuple[int, int]
    """The ids of the padding blocks of the first and the last kind."""


def arena_of(kinds: Sequence[CacheKind], counts: Sequence[int]) -> Arena:
    """Return the arena of the first and the last kind, which have `counts` blocks at the start."""
    low, high = kinds[0].block_bytes, kinds[-1].block_bytes
    size, end = counts[0] * low + counts[-1] * high, end_of_ids(kinds, counts)
    padding = -(-(size + high) // low)
    return Arena((padding + 1) * low, size - end * high, (padding, end))


def end_of_ids(kinds: Sequence[CacheKind], counts: Sequence[int]) -> int:
    """Return the number behind the highest id of the last kind, which shares the memory of `counts` blocks with the
    first: how many of its blocks the arena could have."""
    low, high = kinds[0].block_bytes, kinds[-1].block_bytes
    return (counts[0] * low + counts[-1] * high) // high
