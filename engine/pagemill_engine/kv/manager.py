"""The cache manager: the block tables of every sequence, one per cache kind, kept so that no slot has two writers.

Each sequence has one write cycle per step. `allocate` opens it: it takes blocks, replaces a shared partial block by a
copy, and registers blocks that become full in the prefix cache, so that requests of the same step can hit them.
`launch` hands it to the device, `commit` closes it when the step was read, `free` abandons it. A block that becomes
full with a pending token has no hash yet: `commit` registers it. `commit` also drops the blocks that no later token
reads (`pagemill_protocol.report.cache_kinds`); their content stays cached. `kv.states` has the rules for states, of
which one kind at most comes behind the others.

The device runs steps in the order of their launch. So KV that a launched step writes counts as present for all later
steps, and a block that is freed while a step still writes to it may be reallocated at once.

The manager never decides which sequence gets blocks (`scheduler` does) and never touches memory (`executing` does).
It is all that the scheduler sees of pools and prefix caches. `kv.integrity` checks its invariants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import add

from pagemill_engine.kv.block_pool import Block, KVCacheError
from pagemill_engine.kv.kind_cache import KindCache
from pagemill_engine.kv.split import FixedSplit, Moves, MovingSplit, SplitPolicy
from pagemill_engine.kv.states import States, point_interval
from pagemill_engine.kv.tables import (
    NO_MATCH,
    NO_NEW_BLOCKS,
    Allocation,
    BlockTable,
    CachedSequence,
    KindAllocation,
    KindTable,
    KindUsage,
    KVUsage,
    Match,
    Needs,
    StateTable,
    misuse_error,
)
from pagemill_execution.arena import end_of_ids
from pagemill_protocol import hashes
from pagemill_protocol.report.cache_kinds import (
    FULL,
    CacheKind,
    chunk_blocks,
    first_needed,
    further_chunk_blocks,
    longest_match,
    most_held,
)


class CacheManager:
    def __init__(
        self,
        num_blocks: int | Sequence[int],
        block_size: int,
        *,
        kinds: Sequence[CacheKind] = (FULL,),
        max_step_tokens: int = 1 << 30,
        enable_prefix_caching: bool = True,
        shares_memory: bool = False,
    ) -> None:
        """Create empty caches. `num_blocks`: of each kind. `shares_memory`: memory moves between the first and last."""
        counts = [num_blocks] if isinstance(num_blocks, int) else list(num_blocks)
        self.block_size = block_size
        self.max_step_tokens = max_step_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.kinds = tuple(kinds)
        chunk = chunk_blocks(kinds, counts[0], block_size)
        moves = shares_memory and len(self.kinds) > 1
        ends = [*[None] * (len(self.kinds) - 1), end_of_ids(self.kinds, counts) if moves else None]
        worth = block_size / max(1, self.kinds[0].block_bytes)
        chunks = [chunk, *[further_chunk_blocks(kinds, chunk) or chunk] * (len(self.kinds) - 1)]
        each_of = zip(kinds, counts, ends, chunks, strict=True)
        self.caches = [KindCache(*own, block_size, worth) for own in each_of]
        if chunk > 1:
            self.caches[0].prefixes.show_blocks_in([cache.prefixes for cache in self.caches[1:]])
        self.split: SplitPolicy = MovingSplit(self.caches) if moves else FixedSplit(self.caches)
        self.tables: dict[str, BlockTable] = {}
        self._vectors = [cache for cache in self.caches if not cache.kind.state]
        self.states: States | None = None
        if self.kinds[-1].state:
            interval = point_interval(kinds, block_size)
            self.states = States(
                self.caches[-1], block_size, interval, self._block_hash, enable_prefix_caching=enable_prefix_caching
            )
            self.states.follow(self._vectors)
        self._window_numbers = tuple(number for number, kind in enumerate(kinds) if kind.window is not None)
        self._dropped: list[dict[str, tuple[int, int]]] = [{} for _ in kinds]
        """By kind: sequences whose blocks from the first to before the second index were dropped since the last
        plan."""
        self._drops = bool(self._window_numbers) or self.states is not None

    def has_table(self, sequence: CachedSequence) -> bool:
        return sequence.request_id in self.tables

    def held_blocks(self, sequence: CachedSequence) -> list[tuple[int, list[int]]]:
        """Return for each kind the index of the sequence's first block and the ids of its blocks from there on."""
        table = self.tables[sequence.request_id]
        held = [(own.first, [block.block_id for block in own.blocks]) for own in table.of_kinds]
        if table.state is not None:
            held.append(table.state.held())
        return held

    def being_written(self, sequence: CachedSequence) -> bool:
        """Whether a step in flight, or the one being planned, writes the sequence's blocks."""
        table = self.tables[sequence.request_id]
        return table.num_open_tokens > 0 or table.num_launched_tokens > 0

    # -- start of a sequence ------------------------------------------------------------------------------------------

    def match(self, sequence: CachedSequence, limit_tokens: int | None = None) -> Match:
        """Return the longest prefix in whole blocks behind which the sequence can resume.

        The last token is excluded, because it is always computed. `limit_tokens`: the most tokens to reuse.
        """
        if not self.enable_prefix_caching:
            return NO_MATCH
        most = len(sequence.token_ids) - 1
        if limit_tokens is not None and limit_tokens < most:
            most = limit_tokens
        caches, size = self.caches, self.block_size

        def cached(number: int, index: int) -> Block | None:
            return caches[number].prefixes.get(self._block_hash(sequence, index))

        num_blocks = longest_match(self.kinds, most // size, size, cached)
        num_shared = num_soon = 0
        if self.states is not None:
            num_shared, num_soon = self._without_states(self.states, sequence, most // size)
        if not num_blocks:
            return Match(0, (), num_shared, num_soon) if num_shared else NO_MATCH
        blocks = []
        for number, kind in enumerate(self.kinds):
            found = [cached(number, index) for index in range(first_needed(kind, num_blocks * size, size), num_blocks)]
            blocks.append([block for block in found if block is not None])
        return Match(num_blocks * size, tuple(blocks), num_shared, num_soon)

    def _without_states(self, states: States, sequence: CachedSequence, num_blocks: int) -> tuple[int, int]:
        """Return `num_shared` and `num_soon` of a match of at most `num_blocks` blocks."""
        caches, size = self.caches, self.block_size

        def cached(number: int, index: int) -> Block | None:
            return caches[number].prefixes.get(self._block_hash(sequence, index))

        def cached_soon(number: int, index: int) -> object:
            if number == len(caches) - 1 and self._block_hash(sequence, index) in states.planned:
                return True
            return cached(number, index)

        num_shared = longest_match(self.kinds[:-1], num_blocks, size, cached) if self._vectors else 0
        num_soon = longest_match(self.kinds, num_blocks, size, cached_soon) if states.planned else 0
        return num_shared * size, num_soon * size

    def needs_to_start(self, sequence: CachedSequence, match: Match, num_tokens: int) -> Needs:
        """Return the free blocks that a sequence needs for `num_tokens` tokens, given its prefix hit or its fork."""
        table = self.tables.get(sequence.request_id)
        if table is not None:
            start = sequence.num_computed_tokens
            needs = [
                self._most_held(own.cache, start, num_tokens) - len(own.blocks) + self._needs_copy(own, start)
                for own in table.of_kinds
            ]
            if self.states is not None and table.state is not None:
                needs.append(int(self.states.lacks_own(table.state)))
            return needs
        if self.split.moves:
            for cache, blocks in zip(self.caches, match.blocks, strict=False):
                cache.pool.touch(blocks)  # `has_room` may evict other blocks, of any kind
        needs = []
        for cache, blocks in zip(self._vectors, match.blocks or [()] * len(self._vectors), strict=False):
            revived = sum(1 for block in blocks if block.ref_count == 0)
            needs.append(self._most_held(cache, match.num_tokens, num_tokens) - len(blocks) + revived)
        if self.states is not None:
            needs.append(1)  # a hit that no other sequence reads becomes its own
        return needs

    def needs_to_finish(self, sequence: CachedSequence) -> Needs:
        """Return the blocks that a sequence with a table needs for the rest of its tokens."""
        table = self.tables[sequence.request_id]
        start = sequence.num_computed_tokens
        num_tokens = len(sequence.token_ids) + sequence.num_pending_tokens
        needs = [max(0, self._most_held(own.cache, start, num_tokens) - len(own.blocks)) for own in table.of_kinds]
        if self.states is not None:
            needs.append(0)  # `States.owed` counts what running sequences need
        return needs

    def has_room(self, needs: Needs, reserved: Needs, num_running: int | None) -> bool:
        """Whether `needs` can be allocated. If others run, the `reserved` blocks, which are theirs, stay free, and one
        per running sequence, so that these do not preempt the new one at once. On a mixed simulated workload this
        reduces 49 preemptions to 19, at the same throughput."""
        if num_running is not None:
            spares = [kept + max(each.watermark, num_running) for each, kept in zip(self.caches, reserved, strict=True)]
            if self.states is not None:
                spares[-1] = self.states.owed(table.state for table in self.tables.values())
            needs = [need + spare for need, spare in zip(needs, spares, strict=True)]
        return self.split.make_room(needs, takes=False)

    def start(self, sequence: CachedSequence, match: Match, points: Sequence[int] = ()) -> None:
        """Create the sequence's table with its prefix hit, which may be empty.

        `points`: token counts behind which other sequences are expected to resume.
        """
        if sequence.request_id in self.tables:
            raise KVCacheError(f"{sequence.request_id} already has a block table")
        num_blocks = match.num_tokens // self.block_size
        of_kinds = []
        for number, cache in enumerate(self._vectors):
            blocks = list(match.blocks[number]) if match.blocks else []
            cache.pool.share(blocks)
            of_kinds.append(KindTable(cache, num_blocks - len(blocks), blocks))
        state = None
        if self.states is not None:
            hit = match.blocks[-1] if match.blocks else ()
            state = self.states.start(sequence, hit, match.num_tokens, (*points, match.num_shared))
        self.tables[sequence.request_id] = BlockTable(sequence, of_kinds, num_blocks, state, num_registered=num_blocks)
        sequence.num_computed_tokens = match.num_tokens

    def fork(self, parent: CachedSequence, child: CachedSequence, num_tokens: int) -> int:
        """Let the child share the parent's first `num_tokens` tokens, including a partial last block. With states it
        resumes at the last block boundary.

        Returns how many tokens the child resumes with: none, and it has no table, if a block that it needs was dropped
        behind the parent's window or state and is not cached any more.
        """
        if child.request_id in self.tables:
            raise KVCacheError(f"{child.request_id} already has a block table")
        if num_tokens > parent.num_computed_tokens:
            raise KVCacheError(f"{parent.request_id} has computed {parent.num_computed_tokens} of {num_tokens} tokens")
        if self.being_written(parent):
            raise KVCacheError(f"{parent.request_id} cannot be shared: a step still writes into its last block")
        table = self.tables[parent.request_id]
        state: StateTable | None = None
        last: Block | None = None
        if self.states is not None and table.state is not None:
            num_tokens -= num_tokens % self.block_size
            last = self.states.at(table.state, num_tokens // self.block_size, parent) if num_tokens else None
            if last is None:
                return 0
        end = -(-num_tokens // self.block_size)
        shared = []
        for own in table.of_kinds:
            first = first_needed(own.cache.kind, num_tokens, self.block_size)
            before = own.cache.cached_again(parent.block_hashes, range(first, min(own.first, end)))
            if before is None:
                return 0
            held = own.blocks[max(0, first - own.first) : max(0, end - own.first)]
            shared.append(KindTable(own.cache, first, before + held))
        for mine in shared:
            mine.cache.pool.share(mine.blocks)
        if self.states is not None and last is not None:
            state = self.states.start(child, [last], num_tokens, ())
        table.tail_is_own = False
        num_full = num_tokens // self.block_size
        self.tables[child.request_id] = BlockTable(child, shared, end, state, num_registered=num_full)
        child.num_computed_tokens = num_tokens
        child.block_hashes[:] = parent.block_hashes[:num_full]
        return num_tokens

    def rewind(self, sequence: CachedSequence) -> None:
        """Let a sequence that leaves the batch and keeps its blocks resume where it can: at its last block boundary if
        it has states, whose log is lost. It loses its table if a block that it needs is not cached any more."""
        table = self.tables[sequence.request_id]
        if table.state is None:
            return
        if not table.state.boundary:
            self.free(sequence)
            return
        num_tokens = table.state.boundary * self.block_size
        for own, dropped in zip(table.of_kinds, self._dropped, strict=False):
            first = first_needed(own.cache.kind, num_tokens, self.block_size)
            before = own.cache.cached_again(sequence.block_hashes, range(first, own.first))
            if before is None:
                self.free(sequence)
                return
            dropped.pop(sequence.request_id, None)
            own.cache.pool.share(before)
            own.blocks[:0], own.first = before, min(first, own.first)
        sequence.num_computed_tokens = table.state.folds[-1].num_tokens = num_tokens
        table.num_spare = table.end - table.state.boundary
        table.tail_is_own = table.state.runs = False

    # -- one step ------------------------------------------------------------------------------------------------

    def allocate(self, sequence: CachedSequence, num_tokens: int, num_proposed: int = 0) -> Allocation | None:
        """Open a write of the next `num_tokens` tokens, the last `num_proposed` of which are not known.

        Returns None, changing nothing in any kind, if too few blocks of one are free.
        """
        table = self.tables[sequence.request_id]
        start = sequence.num_computed_tokens
        end = start + num_tokens
        num_known = len(sequence.token_ids) + sequence.num_pending_tokens
        if table.num_open_tokens or not start < end <= num_known + num_proposed:
            raise misuse_error(table, num_tokens)
        size = self.block_size
        if table.tail_is_own and end % size and end <= table.end * size:
            # Nearly every decode: the token goes into the sequence's own last blocks and does not fill them.
            table.num_open_tokens = num_tokens
            return NO_NEW_BLOCKS
        return self._extend(table, start, end, num_proposed)

    def _extend(self, table: BlockTable, start: int, end: int, num_proposed: int) -> Allocation | None:
        """`allocate` where a table changes. It is a function of its own because the variables of a function that has
        comprehensions are slower, and nearly every decode needs none."""
        size, sequence = self.block_size, table.sequence
        num_new = max(0, -(-end // size) - table.end)
        copied = () if table.tail_is_own else [own for own in table.of_kinds if self._needs_copy(own, start)]
        states = self.states
        if states is not None or self.split.moves:
            needs = list(map(add, repeat(num_new), map(copied.__contains__, table.of_kinds)))
            if states is not None and table.state is not None:
                least, wanted = states.needs_to_fold(table.state, end - num_proposed, sequence)
                keeps_all = self.split.moves and wanted > least and self.split.make_room([*needs, wanted], takes=True)
                needs.append(wanted if keeps_all else least)
            if not self.split.make_room(needs, takes=True):
                return None
        else:
            for own in table.of_kinds:
                if num_new + (own in copied) > len(own.cache.pool.free_list):
                    return None
        table.num_open_tokens = end - start
        table.tail_is_own = True
        allocation: Allocation = NO_NEW_BLOCKS
        if num_new or copied:
            allocation = [_append(own, num_new, start // size if own in copied else None) for own in table.of_kinds]
            table.end += num_new
        table.num_spare = table.end - -(-end // size)
        if states is not None and table.state is not None:
            table.state.runs = True
            table.tail_is_own = not (num_proposed or table.num_spare)
            if placed := states.fold(table.state, end - num_proposed, sequence):
                allocation = [*(allocation or [KindAllocation([]) for _ in table.of_kinds])]
                allocation.append(KindAllocation([], None, placed))
            elif allocation is not NO_NEW_BLOCKS:
                allocation = [*allocation, KindAllocation([])]
        num_full = min(end, len(sequence.token_ids)) // size
        if num_full > table.num_registered:
            self._register(table, num_full, written=False)
        return allocation

    def lacks_state(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens cannot be written only because no state can be had. One is released when a step
        in flight, or the one being planned, was read."""
        table = self.tables[sequence.request_id]
        if self.states is None or table.state is None:
            return False
        least, _ = self.states.needs_to_fold(table.state, sequence.num_computed_tokens + num_tokens, sequence)
        return least > self.caches[-1].pool.num_free

    def fits_once_read(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens may not fit only because steps in flight were not read: the sequence then drops
        blocks that their tokens have passed."""
        table, size, end = self.tables[sequence.request_id], self.block_size, sequence.num_computed_tokens
        passed = [first_needed(own.cache.kind, end, size) > own.first for own in table.of_kinds]
        num_new = -(-(end + num_tokens) // size) - table.end
        needs = [num_new] * len(passed) + [0] * (len(self.caches) - len(passed))
        return any(passed) and not self.split.make_room(needs, takes=False)

    def launch(self, request_ids: Collection[str]) -> None:
        """Mark the open writes of these sequences as launched: later steps may build on them."""
        for request_id in request_ids:
            table = self.tables[request_id]
            table.sequence.num_computed_tokens += table.num_open_tokens
            table.num_launched_tokens += table.num_open_tokens
            table.num_open_tokens = 0
        for cache in self.caches:
            cache.pool.now += 1
        if self.states is not None:
            self.states.planned.clear()
            for request_id in request_ids:
                table = self.tables[request_id]
                if table.state is not None:
                    self.states.launch(table.state, table.sequence)

    def commit(self, sequence: CachedSequence, num_tokens: int, *, drops: bool = True) -> None:
        """Close the write of the oldest step in flight, which was read and wrote `num_tokens` tokens of the sequence.

        `drops`: whether to drop what is behind windows and states; otherwise `drop_behind` must be called.
        """
        table = self.tables[sequence.request_id]
        table.num_launched_tokens = num_launched = table.num_launched_tokens - num_tokens
        if num_launched < 0:
            raise KVCacheError(f"{sequence.request_id}: more tokens are committed than steps in flight write")
        num_verified = sequence.num_computed_tokens - num_launched
        num_full = num_verified // self.block_size
        if table.has_unwritten:
            table.mark_written(num_full)
        if num_full > table.num_registered:
            self._register(table, num_full, written=True)
        if drops and self._drops:
            self.drop_behind(sequence)

    def drop_behind(self, sequence: CachedSequence) -> None:
        """Release the blocks that no token behind the verified ones reads."""
        table = self.tables[sequence.request_id]
        for number in self._window_numbers:
            self._drop_behind(number, table, sequence.num_computed_tokens - table.num_launched_tokens)
        if self.states is not None and table.state is not None:
            self.states.settle(table.state, sequence.num_computed_tokens - table.num_launched_tokens, sequence)

    def withdraw(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Take back the last tokens that the only step in flight wrote for the sequence: they were proposed, and are
        not its own. Their blocks stay in the table for the tokens that follow. Call this before `commit`."""
        table = self.tables[sequence.request_id]
        if not 0 <= num_tokens < table.num_launched_tokens:
            raise KVCacheError(f"{sequence.request_id}: {num_tokens} of {table.num_launched_tokens} tokens withdrawn")
        table.num_launched_tokens -= num_tokens
        sequence.num_computed_tokens -= num_tokens
        table.num_spare = table.end - -(-sequence.num_computed_tokens // self.block_size)

    def take_dropped(self) -> list[list[tuple[str, int, int]]]:
        """Return for each kind the table entries (request id, first index, index behind the last) that were dropped
        since the last call."""
        taken = [[(name, *entries) for name, entries in dropped.items()] for dropped in self._dropped]
        for dropped in self._dropped:
            dropped.clear()
        return taken

    def take_moves(self) -> list[Moves]:
        """Return the blocks of each kind that were moved since the last call; nothing if none was."""
        return self.split.take_moves(self.tables.values()) if self.split.moves else []

    def free(self, sequence: CachedSequence) -> None:
        """Drop the sequence's table.

        An open write is abandoned, and the blocks it registered are removed from the prefix cache. Blocks are released
        last to first, so that the tail of a chain is evicted before its head. The last state stays in the prefix cache.
        """
        table = self.tables.pop(sequence.request_id)
        if self.states is not None and table.state is not None:
            num_verified = sequence.num_computed_tokens - table.num_launched_tokens
            self.states.free(table.state, num_verified, sequence, is_open=table.num_open_tokens > 0)
            if table.state.is_trusted:  # what was computed again for want of a state may have been evicted since
                table.num_registered = 0
                self._register(table, num_verified // self.block_size, written=True)
        for own, dropped in zip(table.of_kinds, self._dropped, strict=False):
            # A reader of this step that failed may have removed some of them already.
            own.cache.forget(own.at(index) for index in own.unwritten)
            own.cache.pool.release(reversed(own.blocks))
            dropped.pop(sequence.request_id, None)
        sequence.num_computed_tokens = 0

    def invalidate(self, sequence: CachedSequence) -> set[Block]:
        """Remove the blocks of a sequence that failed in a step from the prefix cache.

        Returns the blocks it was writing. If the sequence has lost its table since, its blocks are found by their
        hashes.
        """
        table = self.tables.get(sequence.request_id)
        if table is None:
            for cache in self.caches:
                found = [cache.prefixes.get(block_hash) for block_hash in sequence.block_hashes]
                cache.forget(block for block in found if block is not None)
            return set()
        in_flight = set()
        for own in table.of_kinds:
            in_flight |= {own.at(index) for index in own.unwritten}
            own.unwritten = []
            own.cache.forget(own.blocks)
        table.has_unwritten = False
        if self.states is not None and table.state is not None:
            in_flight |= self.states.invalidate(table.state)
        return in_flight

    def holds_any(self, sequence: CachedSequence, blocks: set[Block]) -> bool:
        table = self.tables[sequence.request_id]
        if table.state is not None and any(fold.block in blocks for fold in table.state.folds):
            return True
        return any(block in blocks for own in table.of_kinds for block in own.blocks)

    @contextmanager
    def spare_blocks(self) -> Iterator[list[int]]:
        """Lend a block of each kind for a step outside all requests: their ids, or an empty list if a kind has none
        that is free, or has blocks to move first."""
        if any(cache.pool.moved or not cache.pool.num_free for cache in self.caches):
            yield []
            return
        blocks = [cache.pool.allocate(1) for cache in self.caches]
        try:
            yield [block.block_id for (block,) in blocks]
        finally:
            for cache, lent in zip(self.caches, blocks, strict=True):
                cache.pool.release(lent)

    # -- reports --------------------------------------------------------------------------------------------------

    def usage(self) -> list[KindUsage]:
        """Return the blocks of each kind."""
        return [
            KindUsage(cache.kind, cache.pool.num_blocks, cache.pool.num_free, cache.pool.num_evictable)
            for cache in self.caches
        ]

    def slot_usage(self) -> KVUsage:
        """Return the slots of referenced blocks, and how many of them contain a token.

        Call this between steps. O(requests).
        """
        tails: dict[Block, int] = {}
        for table in self.tables.values():
            fill = table.sequence.num_computed_tokens - (table.end - 1) * self.block_size
            for own in table.of_kinds:
                if own.blocks:
                    tail = own.blocks[-1]
                    full = tail.block_hash is not None
                    tails[tail] = max(tails.get(tail, 0), self.block_size if full else fill)
        allocated = sum(cache.pool.num_active for cache in self._vectors) * self.block_size
        return KVUsage(allocated, allocated - sum(self.block_size - fill for fill in tails.values()))

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the prefix chunks of all kinds added and removed since the last call (`hashes.key_of_kind`)."""
        added, removed = self.caches[0].prefixes.drain_events()
        for number, cache in enumerate(self.caches[1:], start=1):
            more, fewer = cache.prefixes.drain_events()
            added += [hashes.key_of_kind(number, chunk) for chunk in more]
            removed += [hashes.key_of_kind(number, chunk) for chunk in fewer]
        return added, removed

    def snapshot(self) -> list[bytes]:
        """Return the prefix chunks of all kinds that are cached now."""
        numbered = enumerate(self.caches)
        return [hashes.key_of_kind(number, chunk) for number, cache in numbered for chunk in cache.prefixes.snapshot()]

    def reset_prefix_cache(self) -> None:
        """Drop all cached content. Tables stay, but their blocks are not shared with new requests."""
        for cache in self.caches:
            cache.forget([block for _, block in cache.prefixes.items()])
        for table in self.tables.values():
            if table.state is not None:
                table.state.is_trusted = False

    # -- helpers --------------------------------------------------------------------------------------------------

    def _most_held(self, cache: KindCache, num_computed: int, num_tokens: int) -> int:
        return most_held(cache.kind, num_computed, num_tokens, self.max_step_tokens, self.block_size)

    def _needs_copy(self, own: KindTable, num_computed: int) -> bool:
        """Whether the next token goes into a block that other sequences read or that is in the prefix cache."""
        index = num_computed // self.block_size - own.first
        if index >= len(own.blocks):
            return False
        block = own.blocks[index]
        return block.ref_count > 1 or block.block_hash is not None

    def _register(self, table: BlockTable, num_full: int, *, written: bool) -> None:
        """Register the blocks up to `num_full` in the prefix caches unless equal content is there. `written`: whether
        a completed step has written them."""
        first, table.num_registered = table.num_registered, num_full
        if not self.enable_prefix_caching:
            return
        for own in table.of_kinds:
            insert = own.cache.prefixes.insert
            for index in range(max(first, own.first), num_full):
                new = insert(own.blocks[index - own.first], self._block_hash(table.sequence, index), index)
                if new and not written:
                    own.unwritten.append(index)
                    table.has_unwritten = True

    def _drop_behind(self, number: int, table: BlockTable, num_verified: int) -> None:
        """Release the blocks of a kind that no token behind the first `num_verified` reads."""
        own, name = table.of_kinds[number], table.sequence.request_id
        first = first_needed(own.cache.kind, num_verified, self.block_size)
        if first <= own.first:
            return
        before, _ = self._dropped[number].get(name, (own.first, 0))
        self._dropped[number][name] = (before, first)
        own.cache.pool.release_passed(own.blocks[: first - own.first])
        del own.blocks[: first - own.first]
        own.first = first

    def _block_hash(self, sequence: CachedSequence, index: int) -> bytes:
        known = sequence.block_hashes
        while len(known) <= index:
            first = len(known) * self.block_size
            parent = known[-1] if known else sequence.cache_root
            known.append(hashes.block_hash(parent, sequence.token_ids[first : first + self.block_size]))
        return known[index]


def _append(own: KindTable, num_new: int, copied: int | None) -> KindAllocation:
    """Append blocks, and replace the one of index `copied`, if given, by a copy."""
    pool = own.cache.pool
    if copied is None:
        fresh = pool.allocate(num_new)
        own.blocks += fresh
        return KindAllocation([block.block_id for block in fresh])
    *fresh, copy = pool.allocate(num_new + 1)
    source = own.at(copied)
    source_id = pool.moved.get(source, source.block_id)  # a plan reads all that it copies before it writes any of it
    own.blocks[copied - own.first] = copy
    pool.release((source,))
    own.blocks += fresh
    return KindAllocation([block.block_id for block in fresh], (copied, source_id, copy.block_id))
