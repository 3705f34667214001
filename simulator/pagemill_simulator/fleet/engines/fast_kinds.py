"""What the further kinds of a KV cache hold, as counters: windows and states of the rows that `fast_pod` has.

How much a row holds follows from its tokens, so it is counted from the rows whenever a step is decided. A state counts
for its row from the start; the second one, which a step needs where it cannot replace the first, is not counted. Of
content without a row only what a window or state ends with is found again, not what a window has passed. Memory that
moves between kinds moves where blocks are free, whatever their content is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from pagemill_engine.kv.kind_cache import watermark_blocks
from pagemill_engine.limits import SchedulerLimits
from pagemill_protocol.report.cache_kinds import CacheKind, first_needed, most_held
from pagemill_protocol.report.state import KindBytes
from pagemill_simulator.fleet.engines.fast_kv import KVCounts, Owner

UNLIMITED = 1 << 40
"""Blocks of the first kind where all kinds are windows or states: it only counts tokens."""


class RowHolding(msgspec.Struct, gc=False):
    """What decides how much a row holds."""

    num_blocks: int
    """Blocks that the row has of a kind that keeps all."""
    num_verified: int
    """Tokens of steps that were read."""


class FurtherKind:
    def __init__(self, kind: CacheKind, num_blocks: int, limits: SchedulerLimits) -> None:
        self.kind = kind
        self.counts = KVCounts(num_blocks, limits.block_size, caches=limits.enable_prefix_caching)
        self.watermark = 0 if kind.state else watermark_blocks(num_blocks)
        self.num_reserved = 0
        """Blocks that prefilling rows will need in the step that is being decided."""
        self._step_tokens = limits.max_num_batched_tokens
        self._first: dict[Owner, int] = {}
        """Index of the first cached block by owner."""

    def held(self, row: RowHolding) -> int:
        if self.kind.state:
            return 1
        return max(0, row.num_blocks - first_needed(self.kind, row.num_verified, self.counts.block_size))

    def needs(self, num_computed: int, num_tokens: int, row: RowHolding | None = None) -> int:
        """Return the further blocks that a row needs for its tokens. Without `row` it has none."""
        if self.kind.state:
            return 0 if row is not None else 1
        most = most_held(self.kind, num_computed, num_tokens, self._step_tokens, self.counts.block_size)
        return most if row is None else max(0, most - self.held(row))

    def sync(self, rows: Iterable[RowHolding]) -> None:
        """Take or free blocks until the rows hold what they need."""
        self.counts.take(sum(map(self.held, rows)) - self.counts.num_active)

    def release(self, row: RowHolding, owner: Owner | None) -> None:
        """Free what a row holds. What its next turn would need stays cached: a block of it may have been passed, and
        was not evicted if blocks without content were free."""
        size, held = self.counts.block_size, self.held(row)
        num_full = row.num_verified // size
        most = held + self.counts.num_free - self.counts.num_cached
        num_cached = min(most, num_full - first_needed(self.kind, num_full * size, size))
        self.counts.give_back(held, num_cached * size, owner)
        if owner is not None:
            self._first[owner] = num_full - num_cached

    def most_hits(self, owner: Owner, num_blocks: int) -> int:
        """Return behind how many of the owner's first `num_blocks` blocks a row can resume."""
        num_cached = self.counts.num_cached_of(owner)
        first = self._first.get(owner, 0)
        num_blocks = min(num_blocks, first + num_cached)
        needed = first_needed(self.kind, num_blocks * self.counts.block_size, self.counts.block_size)
        return num_blocks if num_cached and needed >= first else 0

    def revive(self, owner: Owner, num_blocks: int) -> None:
        """Give a row what it needs behind the owner's first `num_blocks` blocks."""
        size = self.counts.block_size
        self.counts.revive(owner, num_blocks - first_needed(self.kind, num_blocks * size, size))


class FurtherKinds:
    """All kinds but the first one that keeps all."""

    def __init__(self, limits: SchedulerLimits, first: KVCounts) -> None:
        counts = limits.blocks_of_kinds
        kinds = list(zip(limits.kinds, counts, strict=True))
        self._first = first
        self._first_kind = limits.kinds[0] if limits.kinds[0].keeps_all else None
        self.kinds = [FurtherKind(*each, limits) for each in kinds[1 if self._first_kind else 0 :]]
        self._vectors = [each for each in self.kinds if not each.kind.state]
        self._moves = limits.shares_memory and len(kinds) > 1 and self._first_kind is not None
        self.is_short = False
        """Whether a row could not start for want of blocks of these kinds, of which running rows free some."""

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def load(self) -> list[KindBytes]:
        """Return the bytes of each kind, the first included."""
        kinds = [(each.kind.block_bytes, each.counts) for each in self.kinds]
        if self._first_kind is not None:
            kinds.insert(0, (self._first_kind.block_bytes, self._first))
        return [KindBytes(size * own.num_blocks, size * own.num_active, size * own.num_cached) for size, own in kinds]

    def num_free(self) -> int:
        """Return the blocks that every kind of vectors has free."""
        return min([self._first.num_free, *[each.counts.num_free for each in self._vectors]])

    def take(self, num_blocks: int) -> None:
        """Append blocks to rows, or take them back."""
        for each in self._vectors:
            each.counts.take(num_blocks)

    def sync(self, rows: Sequence[RowHolding]) -> None:
        for each in self.kinds:
            each.sync(rows)

    def reserve(self, rows: Iterable[tuple[int, int, RowHolding]]) -> None:
        """Note what prefilling rows, (computed tokens, tokens, row), will need."""
        found = list(rows)
        for each in self.kinds:
            each.num_reserved = sum(each.needs(*row) for row in found)

    def add_reserved(self, num_computed: int, num_tokens: int, row: RowHolding, sign: int = 1) -> None:
        for each in self.kinds:
            each.num_reserved += sign * each.needs(num_computed, num_tokens, row)

    def hits(self, owner: Owner, num_blocks: int) -> int:
        """Return behind how many of the owner's first `num_blocks` blocks a row can resume in all kinds."""
        while True:
            most = min(each.most_hits(owner, num_blocks) for each in self.kinds)
            if most == num_blocks:
                return most
            num_blocks = most

    def has_room(self, num_computed: int, num_tokens: int, num_running: int, num_first: int) -> bool:
        """Whether a row can start with `num_computed` cached tokens and compute up to `num_tokens`, and the first kind
        has the `num_first` blocks for it and for what is kept free."""
        needs = [num_first]
        for each in self.kinds:
            kept = each.num_reserved + max(each.watermark, num_running) if num_running and each.watermark else 0
            needs.append(each.needs(num_computed, num_tokens) + kept)
        if self._make_room(needs):
            return True
        self.is_short = self.is_short or num_first <= self._first.num_free
        return False

    def start(self, owner: Owner | None, num_hits: int) -> None:
        """Give a row its states, and what it resumes with."""
        for each in self.kinds:
            if num_hits and owner is not None:
                each.revive(owner, num_hits)
            elif each.kind.state:
                each.counts.take(1)

    def release(self, row: RowHolding, owner: Owner | None) -> None:
        for each in self.kinds:
            each.release(row, owner)

    def take_changed(self) -> list[int]:
        """Return the sessions whose reusable blocks of any kind have changed since the last call."""
        changed = dict.fromkeys(self._first.take_changed())
        for each in self.kinds:
            changed.update(dict.fromkeys(each.counts.take_changed()))
        return list(changed)

    def findable(self, session: int, chunk_blocks: int) -> list[range]:
        """Return the indices of a session's prefix chunks that are reported of each kind: with one kind, of chunks of
        `chunk_blocks` blocks, with several, of blocks, in the first kind the last ones of such chunks."""
        num_blocks = self._first.num_findable_of(session)
        if not self.kinds:
            return [range(num_blocks // chunk_blocks)]
        found = [range(chunk_blocks - 1, num_blocks, chunk_blocks)] if self._first_kind is not None else []
        is_held, size = self._first.is_held(session), self._first.block_size
        for each in self.kinds:
            is_found = is_held or each.most_hits(session, num_blocks) == num_blocks
            found.append(range(first_needed(each.kind, num_blocks * size, size), num_blocks) if is_found else range(0))
        return found

    def passed(self, num_computed: int, row: RowHolding) -> bool:
        """Whether a row drops blocks when the steps in flight are read."""
        size = self._first.block_size
        return any(
            first_needed(each.kind, num_computed, size) > first_needed(each.kind, row.num_verified, size)
            for each in self._vectors
        )

    def append_room(self, num_blocks: int) -> bool:
        """Whether so many blocks of vectors can be taken, by moving memory if need be."""
        return self._make_room([num_blocks, *[0 if each.kind.state else num_blocks for each in self.kinds]])

    def _make_room(self, needs: Sequence[int]) -> bool:
        """Whether `needs` blocks of each kind are free, by moving memory where that helps."""
        own = [self._first, *[each.counts for each in self.kinds]]
        if all(need <= counts.num_free for need, counts in zip(needs, own, strict=True)):
            return True
        if not self._moves or any(need > each.num_free for need, each in zip(needs[1:-1], own[1:-1], strict=True)):
            return False
        assert self._first_kind is not None
        sizes = self._first_kind.block_bytes, self.kinds[-1].kind.block_bytes
        sides = (own[0], sizes[0], needs[0]), (own[-1], sizes[1], needs[-1])
        for (mine, size, need), (other, others_size, kept) in (sides, sides[::-1]):
            missing = need - mine.num_free
            if missing > 0:
                given = -(-missing * size // others_size)
                if given > other.num_free - kept:
                    return False
                other.resize(-given)
                mine.resize(given * others_size // size)
                return True
        return True
