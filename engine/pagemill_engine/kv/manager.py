"""The KV manager: the block table of every sequence, kept so that no slot has two writers.

Each sequence has one write cycle per step. `allocate_slots` opens it: it takes blocks, replaces a shared partial block
by a copy, and registers blocks that become full in the prefix cache, so that requests of the same step can hit them.
`launch` hands it to the device, `commit` closes it when the step was read, `free` abandons it. A block that becomes
full with a pending token has no hash yet: `commit` registers it.

The device runs steps in the order of their launch. So KV that a launched step writes counts as present for all later
steps, and a block that is freed while a step still writes to it may be reallocated at once.

The manager never decides which sequence gets blocks (`scheduler` does) and never touches memory (`executing` does).
`kv.integrity` checks its invariants.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pagemill_engine.kv.block_pool import Block, BlockPool, KVCacheError
from pagemill_engine.kv.prefix_cache import PrefixCache
from pagemill_protocol import hashes


class CachedSequence(Protocol):
    """The manager's interface to a sequence. Only the manager writes `num_computed_tokens` and `block_hashes`."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    """Number of tokens whose KV is in the table's blocks once all launched steps have run."""
    cache_root: bytes
    block_hashes: list[bytes]
    """Chained hashes of the leading full blocks, as far as they were needed; kept across preemptions."""
    num_pending_tokens: int
    """Number of tokens after `token_ids` that steps in flight sample."""


@dataclass(slots=True)
class BlockTable:
    sequence: CachedSequence
    blocks: list[Block]
    num_open_tokens: int = 0
    """Number of tokens that the step being planned writes."""
    num_launched_tokens: int = 0
    """Number of tokens that steps in flight write: the last ones of `num_computed_tokens`."""
    unwritten: list[int] = field(default_factory=list)
    """Indices of the blocks that were registered in the prefix cache before a completed step has written them."""
    num_registered: int = 0
    """Number of leading blocks that were offered to the prefix cache or came from it."""


class Allocation(NamedTuple):
    new_block_ids: list[int]
    """Ids of the blocks appended to the table."""
    replaced: tuple[int, int, int] | None = None
    """Copy-on-write: (index in the table, source block id, new block id)."""


class KVUsage(NamedTuple):
    allocated_slots: int
    used_slots: int

    @property
    def waste(self) -> float:
        """Share of allocated slots that contain no token."""
        return 1 - self.used_slots / self.allocated_slots if self.allocated_slots else 0.0


NO_NEW_BLOCKS = Allocation([])
"""The result of nearly every decode: its token goes into a block that the sequence has."""


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache = PrefixCache(block_size, hashes.prefix_chunk_blocks(block_size, num_blocks))
        self.pool = BlockPool(num_blocks, on_evict=self.prefix_cache.remove)
        self.tables: dict[str, BlockTable] = {}

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_table(self, sequence: CachedSequence) -> bool:
        return sequence.request_id in self.tables

    def block_ids(self, sequence: CachedSequence) -> list[int]:
        return [block.block_id for block in self.tables[sequence.request_id].blocks]

    def num_table_blocks(self, sequence: CachedSequence) -> int:
        return len(self.tables[sequence.request_id].blocks)

    def being_written(self, sequence: CachedSequence) -> bool:
        """Whether a step in flight, or the one being planned, writes the sequence's blocks."""
        table = self.tables[sequence.request_id]
        return table.num_open_tokens > 0 or table.num_launched_tokens > 0

    # -- start of a sequence ------------------------------------------------------------------------------------------

    def get_computed_blocks(self, sequence: CachedSequence) -> list[Block]:
        """Return the longest cached prefix in whole blocks.

        The last token is excluded, because it is always computed.
        """
        if not self.enable_prefix_caching:
            return []
        found: list[Block] = []
        for index in range((len(sequence.token_ids) - 1) // self.block_size):
            block = self.prefix_cache.get(self._block_hash(sequence, index))
            if block is None:
                break
            found.append(block)
        return found

    def num_blocks_to_start(self, sequence: CachedSequence, computed_blocks: list[Block], num_tokens: int) -> int:
        """Return the free blocks that a sequence needs for `num_tokens` tokens, given its prefix hit or its fork."""
        table = self.tables.get(sequence.request_id)
        if table is not None:
            copies = 1 if self._write_needs_copy(table) else 0
            return self.blocks_for(num_tokens) - len(table.blocks) + copies
        revived = sum(1 for block in computed_blocks if block.ref_count == 0)
        return self.blocks_for(num_tokens) - len(computed_blocks) + revived

    def start(self, sequence: CachedSequence, computed_blocks: list[Block]) -> None:
        """Create the sequence's table with its prefix hit, which may be empty."""
        if sequence.request_id in self.tables:
            raise KVCacheError(f"{sequence.request_id} already has a block table")
        self.pool.share(computed_blocks)
        self.tables[sequence.request_id] = BlockTable(
            sequence, list(computed_blocks), num_registered=len(computed_blocks)
        )
        sequence.num_computed_tokens = len(computed_blocks) * self.block_size

    def fork(self, parent: CachedSequence, child: CachedSequence, num_tokens: int) -> None:
        """Let the child share the parent's first `num_tokens` tokens, including a partial last block."""
        if child.request_id in self.tables:
            raise KVCacheError(f"{child.request_id} already has a block table")
        if num_tokens > parent.num_computed_tokens:
            raise KVCacheError(f"{parent.request_id} has computed {parent.num_computed_tokens} of {num_tokens} tokens")
        if self.being_written(parent):
            raise KVCacheError(f"{parent.request_id} cannot be shared: a step still writes into its last block")
        shared = self.tables[parent.request_id].blocks[: self.blocks_for(num_tokens)]
        self.pool.share(shared)
        self.tables[child.request_id] = BlockTable(child, shared, num_registered=num_tokens // self.block_size)
        child.num_computed_tokens = num_tokens
        child.block_hashes[:] = parent.block_hashes[: num_tokens // self.block_size]

    # -- one step ------------------------------------------------------------------------------------------------

    def allocate_slots(self, sequence: CachedSequence, num_tokens: int) -> Allocation | None:
        """Open a write of the next `num_tokens` tokens.

        Returns None, changing nothing, if too few blocks are free.
        """
        table = self.tables[sequence.request_id]
        blocks = table.blocks
        start = sequence.num_computed_tokens
        end = start + num_tokens
        if table.num_open_tokens or not 0 < num_tokens <= len(sequence.token_ids) + sequence.num_pending_tokens - start:
            raise _misuse_error(table, num_tokens)
        if end % self.block_size and end <= len(blocks) * self.block_size:
            tail = blocks[-1]
            if tail.ref_count == 1 and tail.block_hash is None:
                # Nearly every decode: the token goes into the sequence's own last block and does not fill it.
                table.num_open_tokens = num_tokens
                return NO_NEW_BLOCKS
        num_new = -(-end // self.block_size) - len(blocks)
        needs_copy = self._write_needs_copy(table)
        if num_new + needs_copy > len(self.pool.free_list):
            return None
        table.num_open_tokens = num_tokens
        allocation = NO_NEW_BLOCKS
        if num_new or needs_copy:
            allocation = self._extend(table, num_new, needs_copy)
        num_full = min(end, len(sequence.token_ids)) // self.block_size
        if num_full > table.num_registered:
            table.unwritten += self._register(table, num_full)
        return allocation

    def launch(self, request_ids: Iterable[str]) -> None:
        """Mark the open writes of these sequences as launched: later steps may build on them."""
        for request_id in request_ids:
            table = self.tables[request_id]
            table.sequence.num_computed_tokens += table.num_open_tokens
            table.num_launched_tokens += table.num_open_tokens
            table.num_open_tokens = 0

    def commit(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Close the write of the oldest step in flight, which was read and wrote `num_tokens` tokens of the
        sequence."""
        table = self.tables[sequence.request_id]
        table.num_launched_tokens = num_launched = table.num_launched_tokens - num_tokens
        if num_launched < 0:
            raise KVCacheError(f"{sequence.request_id}: more tokens are committed than steps in flight write")
        num_full = (sequence.num_computed_tokens - num_launched) // self.block_size
        if table.unwritten:
            table.unwritten = [index for index in table.unwritten if index >= num_full]
        if num_full > table.num_registered:
            self._register(table, num_full)

    def free(self, sequence: CachedSequence) -> None:
        """Drop the sequence's table.

        An open write is abandoned, and the blocks it registered are removed from the prefix cache. Blocks are released
        last to first, so that the tail of a chain is evicted before its head.
        """
        table = self.tables.pop(sequence.request_id)
        # A reader of this step that failed may have removed some of them already.
        self._forget([table.blocks[index] for index in table.unwritten])
        self.pool.release(reversed(table.blocks))
        sequence.num_computed_tokens = 0

    def invalidate(self, sequence: CachedSequence) -> set[int]:
        """Remove the blocks of a sequence that failed in a step from the prefix cache.

        Returns the ids of the blocks it was writing. If the sequence has lost its table since, its blocks are found by
        their hashes.
        """
        table = self.tables.get(sequence.request_id)
        if table is None:
            found = [self.prefix_cache.get(block_hash) for block_hash in sequence.block_hashes]
            self._forget([block for block in found if block is not None])
            return set()
        in_flight = {table.blocks[index].block_id for index in table.unwritten}
        table.unwritten = []
        self._forget(table.blocks)
        return in_flight

    def holds_any(self, sequence: CachedSequence, block_ids: set[int]) -> bool:
        return any(block.block_id in block_ids for block in self.tables[sequence.request_id].blocks)

    # -- reports --------------------------------------------------------------------------------------------------

    def usage(self) -> KVUsage:
        """Return the slots of referenced blocks, and how many of them contain a token.

        Call this between steps. O(requests).
        """
        tails: dict[int, int] = {}
        for table in self.tables.values():
            if not table.blocks:
                continue
            fill = table.sequence.num_computed_tokens - (len(table.blocks) - 1) * self.block_size
            tail = table.blocks[-1]
            full = tail.block_hash is not None
            tails[tail.block_id] = max(tails.get(tail.block_id, 0), self.block_size if full else fill)
        allocated = self.pool.num_active * self.block_size
        return KVUsage(allocated, allocated - sum(self.block_size - fill for fill in tails.values()))

    def reset_prefix_cache(self) -> None:
        """Drop all cached content. Tables stay, but their blocks are not shared with new requests."""
        self._forget([block for _, block in self.prefix_cache.items()])

    # -- helpers --------------------------------------------------------------------------------------------------

    def _write_needs_copy(self, table: BlockTable) -> bool:
        """Whether the next token goes into a block that other sequences read or that is in the prefix cache."""
        index = table.sequence.num_computed_tokens // self.block_size
        if index >= len(table.blocks):
            return False
        block = table.blocks[index]
        return block.ref_count > 1 or block.block_hash is not None

    def _extend(self, table: BlockTable, num_new: int, needs_copy: bool) -> Allocation:
        fresh = self.pool.allocate(num_new + needs_copy)
        replaced = None
        if needs_copy:
            index = table.sequence.num_computed_tokens // self.block_size
            source, copy = table.blocks[index], fresh.pop()
            table.blocks[index] = copy
            self.pool.release((source,))
            replaced = (index, source.block_id, copy.block_id)
        table.blocks += fresh
        return Allocation([block.block_id for block in fresh], replaced)

    def _register(self, table: BlockTable, num_full: int) -> list[int]:
        """Register the blocks up to `num_full` in the prefix cache unless equal content is there.

        Returns the registered indices.
        """
        first, table.num_registered = table.num_registered, num_full
        if not self.enable_prefix_caching:
            return []
        return [
            index
            for index in range(first, num_full)
            if self.prefix_cache.insert(table.blocks[index], self._block_hash(table.sequence, index), index)
        ]

    def _forget(self, blocks: list[Block]) -> None:
        for block in blocks:
            if block.block_hash is not None:
                self.prefix_cache.remove(block)
                self.pool.move_to_front(block)

    def _block_hash(self, sequence: CachedSequence, index: int) -> bytes:
        known = sequence.block_hashes
        while len(known) <= index:
            first = len(known) * self.block_size
            parent = known[-1] if known else sequence.cache_root
            known.append(hashes.block_hash(parent, sequence.token_ids[first : first + self.block_size]))
        return known[index]


def _misuse_error(table: BlockTable, num_tokens: int) -> KVCacheError:
    sequence = table.sequence
    if table.num_open_tokens:
        return KVCacheError(f"{sequence.request_id} is already being written by a step")
    due = len(sequence.token_ids) + sequence.num_pending_tokens - sequence.num_computed_tokens
    return KVCacheError(f"{sequence.request_id}: {num_tokens} tokens asked for, {due} are due")
