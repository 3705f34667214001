"""How a cache's memory is divided among its kinds: as planned, or moving to where blocks are needed.

Where memory moves, the first and the last kind share one arena. Blocks of the first one count from its low end, those
of the last one from its high end, and the border between them moves. The kind that needs a block gets the bytes of the
next blocks that the other one would evict if all of these rank below its own (`kv.block_pool`), or if it has none that
is free. Blocks in the way are moved to others of their kind: their tables stay as they are, only the ids change.
`take_moves` returns what the next plan has to copy, and the entries of tables on the device that it has to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from pagemill_engine.kv.block_pool import Block
from pagemill_engine.kv.kind_cache import KindCache
from pagemill_engine.kv.tables import BlockTable


class Moves(NamedTuple):
    """The moved blocks of one kind."""

    placed: list[tuple[str, int, int]]
    """(sequence, index in its table, id of the block there), of every table that holds one."""
    copies: list[tuple[int, int]]
    """(id before, id now) of those with content."""


class SplitPolicy(Protocol):
    moves: bool
    """Whether pools change their sizes."""
    num_bytes: int
    """The most bytes of all blocks together."""

    def make_room(self, needs: Sequence[int], *, takes: bool) -> bool:
        """Whether `needs` blocks of each kind are free, by moving memory where that helps. If not, nothing changes.

        `takes`: whether they are allocated now. Then memory is also moved to evict what is worth least.
        """

    def take_moves(self, tables: Iterable[BlockTable]) -> list[Moves]:
        """Return the moves of each kind since the last call."""


class FixedSplit:
    moves = False

    def __init__(self, caches: Sequence[KindCache]) -> None:
        self._pools = [cache.pool for cache in caches]
        self.num_bytes = sum(cache.pool.num_blocks * cache.kind.block_bytes for cache in caches)

    def make_room(self, needs: Sequence[int], *, takes: bool) -> bool:
        for need, pool in zip(needs, self._pools, strict=True):  # noqa: SIM110 - nearly every block comes by here
            if need > len(pool.free_list):
                return False
        return True

    def take_moves(self, tables: Iterable[BlockTable]) -> list[Moves]:
        return []


class MovingSplit:
    moves = True

    def __init__(self, caches: Sequence[KindCache]) -> None:
        """`caches`: of which the last one's ids fall from `end_of_ids`."""
        self._caches = caches
        self._sides = (0, len(caches) - 1)
        level = caches[-1].pool.level = caches[0].pool.level
        level.free_lists += [caches[number].pool.free_list for number in self._sides]
        self.num_bytes = sum(cache.pool.num_blocks * cache.kind.block_bytes for cache in caches)
        self._unused = 0
        """Bytes between the two kinds, which are too few for a block of the kind that needed one last."""

    def make_room(self, needs: Sequence[int], *, takes: bool) -> bool:
        for number, need in enumerate(needs):
            if number not in self._sides and need > self._caches[number].pool.num_free:
                return False
        for own, other in (self._sides, self._sides[::-1]):
            missing = needs[own] - self._caches[own].pool.num_free
            if missing > 0:
                return self._take(own, other, missing, needs[other])
        for own, other in (self._sides, self._sides[::-1]) if takes else ():
            self._take_lesser(own, other, needs)
        return True

    def _take_lesser(self, own: int, other: int, needs: Sequence[int]) -> None:
        """Take what has a lower rank in the other kind than the blocks that `own` would have to evict."""
        pool, others = self._caches[own].pool, self._caches[other].pool
        while pool.num_free - pool.num_evictable < needs[own]:
            given = self._given(own, other, 1)
            if given and not others.rank_of(given) < pool.rank_of(1):
                return
            if not self._take(own, other, 1, needs[other]):
                return

    def _given(self, own: int, other: int, count: int) -> int:
        """Return the blocks that the other kind gives for `count` blocks of a kind."""
        short = count * self._caches[own].kind.block_bytes - self._unused
        return max(0, -(-short // self._caches[other].kind.block_bytes))

    def _take(self, own: int, other: int, count: int, kept: int) -> bool:
        """Add `count` blocks to a kind with bytes of the other one, of which `kept` blocks stay free."""
        mine, theirs = self._caches[own], self._caches[other]
        given = self._given(own, other, count)
        if given > theirs.pool.num_free - kept or not theirs.pool.can_give_back(given):
            return False
        if given:
            theirs.pool.resize(theirs.pool.num_blocks - given)
        mine.pool.resize(mine.pool.num_blocks + count)
        self._unused += given * theirs.kind.block_bytes - count * mine.kind.block_bytes
        return True

    def take_moves(self, tables: Iterable[BlockTable]) -> list[Moves]:
        if not any(cache.pool.moved for cache in self._caches):
            return []
        tables = list(tables)
        found = []
        for number, cache in enumerate(self._caches):
            moved, cache.pool.moved = cache.pool.moved, {}
            placed = []
            for table in tables:
                name = table.sequence.request_id
                placed += [(name, index, block.block_id) for index, block in _held(table, number) if block in moved]
            copies = [
                (before, block.block_id)
                for block, before in moved.items()
                if before != block.block_id and (block.ref_count or block.block_hash is not None)
            ]
            found.append(Moves(placed, copies))
        return found


def _held(table: BlockTable, number: int) -> list[tuple[int, Block]]:
    """Return a table's blocks of a kind with their indices, of states those that the step being planned may read."""
    if number < len(table.of_kinds):
        own = table.of_kinds[number]
        return list(enumerate(own.blocks, own.first))
    if (state := table.state) is None:
        return []
    folds = state.folds[: len(state.folds) - state.num_opened]
    if state.source is not None and state.source not in folds:
        folds = [*folds, state.source]
    return [(fold.boundary - 1, fold.block) for fold in folds]
