"""States of recurrent layers: the block in which each sequence has its newest state, and where the next one goes.

A state is behind a block boundary; the tokens since are in a log that the runner has for each row. A step folds every
block that its own tokens complete, proposed ones excepted, and what accepted proposals completed since the step before.
A state is replaced in place where no other sequence can want it. Otherwise the next one goes into a fresh block, and
the one before stays until the step was read: it is what remains if the sequence turns out to have ended.

States at wanted points are put into the prefix cache when their step is launched, so that no step reads what it writes.
`kv.manager` calls this for models that have such layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from pagemill_engine.kv.block_pool import Block
from pagemill_engine.kv.kind_cache import KindCache
from pagemill_engine.kv.tables import CachedSequence, Fold, StateTable
from pagemill_protocol.report.cache_kinds import CacheKind

MIN_POINT_TOKENS = 512
"""Fewest tokens between two states that are kept of a long prompt."""
BYTES_PER_POINT = 4
"""A state of a long prompt is kept for so many times its bytes of keys and values."""


class States:
    def __init__(
        self,
        cache: KindCache,
        block_size: int,
        interval: int,
        block_hash: Callable[[CachedSequence, int], bytes],
        *,
        enable_prefix_caching: bool,
    ) -> None:
        """`interval`: tokens between the states that are kept of long prompts."""
        self.cache = cache
        self._block_hash = block_hash
        self.block_size = block_size
        self.interval = interval
        self.enable_prefix_caching = enable_prefix_caching
        self.planned: dict[bytes, str] = {}
        """Hashes of states that the step being planned writes for others, with the sequences that do."""

    def follow(self, caches: Iterable[KindCache]) -> None:
        """Let a state be evicted first once the block before it was evicted from one of the caches."""
        for cache in caches:
            cache.pool.on_evict = partial(self._evicted, cache)

    def _evicted(self, cache: KindCache, block: Block) -> None:
        state = None if block.block_hash is None else self.cache.prefixes.get(block.block_hash)
        if state is not None:
            self.cache.pool.devalue(state)
        cache.prefixes.remove(block)

    def start(
        self, sequence: CachedSequence, blocks: Iterable[Block], num_tokens: int, points: Iterable[int]
    ) -> StateTable:
        """Return the table of a sequence that resumes with `num_tokens` tokens. `points`: token counts."""
        folds = [Fold(num_tokens // self.block_size, block, num_tokens) for block in blocks]
        for fold in folds if self.enable_prefix_caching else ():
            self._weigh(fold, sequence)
        self.cache.pool.share(fold.block for fold in folds)
        interval = self.interval if self.enable_prefix_caching else 0
        wanted = wanted_boundaries(points, interval, num_tokens, len(sequence.token_ids), self.block_size)
        return StateTable(folds, wanted)

    def lacks_own(self, own: StateTable) -> bool:
        """Whether a sequence cannot write its next state without a further block."""
        return not own.folds or own.folds[-1].block.ref_count > 1

    def owed(self, tables: Iterable[StateTable | None]) -> int:
        """Return how many running sequences have no block of their own."""
        return sum(own is not None and own.runs and self.lacks_own(own) for own in tables)

    def needs_to_fold(self, own: StateTable, num_tokens: int, sequence: CachedSequence) -> tuple[int, int]:
        """Return the free blocks that a step needs for the states behind its first `num_tokens` tokens, and how many
        it uses if it can, so that none that is wanted is lost."""
        last = num_tokens // self.block_size
        if last <= own.boundary:
            return 0, 0
        num_wanted = sum(own.boundary < boundary < last for boundary in own.wanted)
        if not self._can_replace(own, last, sequence):
            return 1, 1 + num_wanted
        return 0, num_wanted + self._is_kept(own)

    def fold(self, own: StateTable, num_tokens: int, sequence: CachedSequence) -> list[tuple[int, int]]:
        """Plan the states that a step writes which computes the first `num_tokens` tokens: (index in the table, block
        id) of each. One that is wanted on the way is left out if no block is free that is worth less."""
        begin, pool = own.boundary, self.cache.pool
        last = num_tokens // self.block_size
        if last <= begin:
            return []
        num_known = len(sequence.token_ids) // self.block_size
        own.source = own.folds[-1] if own.folds else None
        own.wanted = [boundary for boundary in own.wanted if boundary >= begin]
        replaces = self._can_replace(own, last, sequence)
        if replaces and self._is_kept(own):
            replaces = not self._may_evict(own.folds[-1].block.worth)
        block = own.folds.pop().block if replaces else pool.allocate(1)[0]
        block.allocated_in = pool.now
        self.cache.forget((block,))
        between = [each for each in own.wanted if begin < each < last and each <= num_known]
        between = [boundary for boundary in between if not self._has(sequence, boundary)]
        opened = []
        for boundary in between:
            if self._may_evict(self._worth(boundary - begin)):
                opened.append(Fold(boundary, pool.allocate(1)[0], num_tokens))
                begin = boundary
        opened.append(Fold(last, block, num_tokens))
        own.num_opened = len(opened)
        own.folds += opened
        if self.enable_prefix_caching:
            for fold in opened:
                if fold.boundary in own.wanted and fold.boundary <= num_known:
                    self.planned[self._block_hash(sequence, fold.boundary - 1)] = sequence.request_id
        return [(fold.boundary - 1, fold.block.block_id) for fold in opened]

    def launch(self, own: StateTable, sequence: CachedSequence) -> None:
        """Show the states of a launched step to others, those of known tokens."""
        if not own.num_opened:
            return
        for fold in own.folds[-own.num_opened :]:
            if fold.boundary in own.wanted and fold.boundary * self.block_size <= len(sequence.token_ids):
                fold.unwritten = self._insert(own, fold, sequence)
        own.num_opened, own.source = 0, None

    def settle(self, own: StateTable, num_verified: int, sequence: CachedSequence) -> None:
        """Release the states before the newest one that a completed step has written."""
        folds = own.folds
        for fold in folds:
            if fold.num_tokens <= num_verified:
                if fold.boundary in own.wanted and not fold.unwritten and fold.block.block_hash is None:
                    self._insert(own, fold, sequence)  # its last token was not known when its step was launched
                fold.unwritten = False
        while len(folds) > 1 and folds[1].num_tokens <= num_verified:
            self.cache.pool.release((folds.pop(0).block,))

    def free(self, own: StateTable, num_verified: int, sequence: CachedSequence, *, is_open: bool) -> None:
        """Release all states of a sequence. The newest that a completed step has written stays in the prefix cache.

        `is_open`: whether a step was being planned with it, which will not write them.
        """
        if is_open and own.num_opened:
            self._abandon(own, sequence)
        written = [fold for fold in own.folds if fold.num_tokens <= num_verified]
        if written:
            self._insert(own, written[-1], sequence)
        self.cache.forget(fold.block for fold in own.folds if fold.unwritten and fold not in written)
        self.cache.pool.release(fold.block for fold in own.folds)

    def _abandon(self, own: StateTable, sequence: CachedSequence) -> None:
        """Undo the folds of the step being planned."""
        self.planned = {found: name for found, name in self.planned.items() if name != sequence.request_id}
        opened = own.folds[-own.num_opened :]
        del own.folds[-own.num_opened :]
        if own.source is not None and opened[-1].block is own.source.block:
            own.folds.append(own.source)
            opened.pop()
        self.cache.pool.release(fold.block for fold in opened)

    def invalidate(self, own: StateTable) -> set[Block]:
        """Remove a sequence's states from the prefix cache for good. Returns those that steps in flight write."""
        in_flight = {fold.block for fold in own.folds if fold.unwritten}
        self.cache.forget(fold.block for fold in own.folds)
        own.is_trusted = False
        for fold in own.folds:
            fold.unwritten = False
        return in_flight

    def at(self, own: StateTable, boundary: int, sequence: CachedSequence) -> Block | None:
        """Return the state behind a boundary, of a sequence that no step writes, from its table or the cache."""
        for fold in own.folds:
            if fold.boundary == boundary:
                return fold.block
        return self.cache.prefixes.get(self._block_hash(sequence, boundary - 1))

    def _can_replace(self, own: StateTable, last: int, sequence: CachedSequence) -> bool:
        """Whether the newest state may be replaced: no other sequence reads it, and all tokens of the next are known.
        Otherwise it is what remains if the sequence has ended with a token that is not known yet."""
        return not self.lacks_own(own) and last * self.block_size <= len(sequence.token_ids)

    def _is_kept(self, own: StateTable) -> bool:
        """Whether the newest state is better not replaced: others may resume with it."""
        return own.boundary in own.wanted or own.folds[-1].block.block_hash is not None

    def _has(self, sequence: CachedSequence, boundary: int) -> bool:
        return (
            self.enable_prefix_caching and self.cache.prefixes.get(self._block_hash(sequence, boundary - 1)) is not None
        )

    def _insert(self, own: StateTable, fold: Fold, sequence: CachedSequence) -> bool:
        if not (self.enable_prefix_caching and own.is_trusted and fold.block.block_hash is None):
            return False
        index = fold.boundary - 1
        self._weigh(fold, sequence)
        return self.cache.prefixes.insert(fold.block, self._block_hash(sequence, index), index)

    def _weigh(self, fold: Fold, sequence: CachedSequence) -> None:
        """Note what a state is worth: without it, its sequence resumes with the one before."""
        before = fold.boundary - 1
        while before and self.cache.prefixes.get(self._block_hash(sequence, before - 1)) is None:
            before -= 1
        fold.block.worth = self._worth(fold.boundary - before)

    def _worth(self, num_blocks: int) -> float:
        return num_blocks * self.block_size / self.cache.kind.block_bytes

    def _may_evict(self, worth: float) -> bool:
        """Whether a state that no row needs itself may take the next block: not what is worth more than it."""
        return self.cache.pool.rank_of(1) <= self.cache.pool.level.rank + worth


def wanted_boundaries(
    points: Iterable[int], interval: int, num_resumed: int, num_known: int, block_size: int
) -> list[int]:
    """Return the block boundaries behind which others may want to resume a sequence, rising.

    `points`: token counts where its text may go on differently, and those that another request was seen to share; to
    these come every `interval` tokens of what is known, if any. The state at the end of the sequence is kept anyway.
    """
    regular = range(interval, num_known + 1, interval) if interval else ()
    found = {point // block_size for point in (*points, *regular) if point <= num_known}
    return sorted(boundary for boundary in found if boundary * block_size > num_resumed)


def point_interval(kinds: Iterable[CacheKind], block_size: int) -> int:
    """Return the tokens between the states that are kept of long prompts: states cost bytes that the keys and values of
    other prompts could have."""
    num_bytes = {True: 0, False: 0}
    for kind in kinds:
        num_bytes[kind.state] += kind.block_bytes
    if not num_bytes[False]:
        return MIN_POINT_TOKENS
    num_tokens = BYTES_PER_POINT * num_bytes[True] * block_size // num_bytes[False]
    return max(MIN_POINT_TOKENS, num_tokens) // block_size * block_size
