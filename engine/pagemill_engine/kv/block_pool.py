"""The pool of KV blocks: reference counts, and the order in which free blocks are taken.

Block objects are created once, and where memory moves between kinds (`kv.split`); no step allocates a Python object for
a block. Free blocks form an intrusive doubly linked list: blocks without reusable content come first, then cached ones
that a window has passed and no other request has hit, then the other cached ones by rank. A rank is the level of
eviction when the block was released plus its worth: the tokens that would have to be computed again per byte. Where all
are worth the same, the least recently used is evicted first; what is worth more stays until more was evicted.
Requests are `kv.manager`'s part, hashes those of `kv.prefix_cache`, which is notified of evictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import inf


class KVCacheError(RuntimeError):
    """The KV cache was used incorrectly: a fault of the engine, never of a request."""


class Block:
    """One KV block: `block_size` slots in every layer."""

    __slots__ = (
        "allocated_in", "block_hash", "block_id", "next", "prefix_chunk_end", "prev", "rank", "ref_count", "was_shared",
        "worth",
    )  # fmt: skip

    def __init__(self, block_id: int, worth: float = 0.0) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        """Hash of the content; set while the prefix cache contains the block."""
        self.prefix_chunk_end = False
        """Whether it is the last block of a prefix chunk (see `kv.prefix_cache`)."""
        self.was_shared = False
        """Whether another request has used its content."""
        self.allocated_in = 0
        """Number of the plan in which it was allocated."""
        self.worth = worth
        """Tokens that would have to be computed again without its content, per byte."""
        self.rank = 0.0
        """Its place in the order of eviction since it was last released."""
        self.prev: Block | None = None
        self.next: Block | None = None
        """Next and previous block in the free list; both `None` while the block is in use."""

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, cached={self.block_hash is not None})"


class FreeList:
    """A doubly linked ring through the blocks themselves, with two sentinels: every operation is O(1)."""

    def __init__(self) -> None:
        self._ring, self._border = Block(-1), Block(-2)
        self._ring.prev = self._ring.next = self._border
        self._border.prev = self._border.next = self._ring
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        """Yield the blocks from the one that is taken next to the one that is taken last."""
        block = self._ring.next
        while block is not None and block is not self._ring:
            if block is not self._border:
                yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Add a block behind those of its rank. O(1) unless blocks are worth more than it."""
        after = self._ring
        while (before := after.prev) is not None and before is not self._border and before.rank > block.rank:
            after = before
        self._link(before, block, after)

    def append_last(self, block: Block) -> None:
        """Add a block behind all others."""
        if (last := self._ring.prev) is not None:
            block.rank = max(block.rank, last.rank)
        self._link(last, block, self._ring)

    @property
    def lowest_rank(self) -> float:
        """The lowest rank of the blocks that were appended."""
        block = self._border.next
        return inf if block is None or block is self._ring else block.rank

    def append_left(self, block: Block) -> None:
        self._link(self._ring, block, self._ring.next)

    def append_before_border(self, block: Block) -> None:
        """Add a block that is taken before all blocks that were appended, and after those before the border."""
        self._link(self._border.prev, block, self._border)

    def pop_left(self) -> Block:
        block = self._ring.next
        if block is self._border:
            block = block.next
        if block is None or block is self._ring:
            raise KVCacheError("no free block is left")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        before, after = block.prev, block.next
        if before is None or after is None:
            raise KVCacheError(f"{block} is not in the free list")
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._size -= 1

    def _link(self, before: Block | None, block: Block, after: Block | None) -> None:
        if before is None or after is None or block.next is not None:
            raise KVCacheError(f"{block} is already in the free list")
        before.next = after.prev = block
        block.prev, block.next = before, after
        self._size += 1


class EvictionLevel:
    """The lowest rank in the pools that share memory when one of them had to evict last."""

    def __init__(self) -> None:
        self.rank = 0.0
        self.free_lists: list[FreeList] = []

    def evicts(self, rank: float) -> None:
        """Note that a block is evicted, not always that of the lowest rank: its pool may find no other memory."""
        for free_list in self.free_lists:
            rank = min(rank, free_list.lowest_rank)
        self.rank = max(self.rank, rank)


class BlockPool:
    """All blocks of one kind, allocated by reference count."""

    def __init__(
        self, num_blocks: int, on_evict: Callable[[Block], None], end: int | None = None, worth: float = 1.0
    ) -> None:
        """Create free blocks. Their ids rise from 0, or fall from before `end`. `worth`: of each."""
        if num_blocks < 1:
            raise KVCacheError(f"a KV cache needs at least one block, got {num_blocks}")
        self._end, self._worth = end, worth
        self.blocks = [Block(self.id_at(place), worth) for place in range(num_blocks)]
        """In the order in which memory was given to the pool: the last one is given back first."""
        self.free_list = FreeList()
        self.num_evictable = 0
        """Number of free blocks whose content is in the prefix cache."""
        self.now = 1
        """Number of the plan that is being made."""
        self.moved: dict[Block, int] = {}
        """Blocks that have other ids than in the plan before, with those ids: the next plan has to copy them."""
        self.on_evict = on_evict
        self.level = EvictionLevel()
        for block in self.blocks:
            self.free_list.append_before_border(block)

    def id_at(self, place: int) -> int:
        return place if self._end is None else self._end - 1 - place

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, including cached ones."""
        return len(self.free_list)

    @property
    def num_active(self) -> int:
        return len(self.blocks) - len(self.free_list)

    def allocate(self, num_blocks: int) -> list[Block]:
        """Allocate blocks with one reference each. Evicts cached content if no other block is free."""
        if num_blocks > len(self.free_list):
            raise KVCacheError(f"{num_blocks} blocks asked for, {len(self.free_list)} are free")
        taken = []
        for _ in range(num_blocks):
            block = self.free_list.pop_left()
            if block.block_hash is not None:
                self._evict(block)
            block.ref_count = 1
            block.was_shared = False
            block.allocated_in = self.now
            taken.append(block)
        if self.moved:
            for block in taken:
                self.moved.pop(block, None)
        return taken

    def share(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each block. A cached block leaves the free list."""
        for block in blocks:
            block.was_shared = True
            if block.ref_count == 0:
                self.free_list.remove(block)
                if block.block_hash is not None:
                    self.num_evictable -= 1
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop one reference of each block, in the order in which they are to be evicted."""
        for block in blocks:
            if block.ref_count < 1:
                raise KVCacheError(f"{block} was freed twice")
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.block_hash is None:
                self.free_list.append_left(block)
                continue
            block.rank = self.level.rank + block.worth
            self.free_list.append(block)
            self.num_evictable += 1

    def release_passed(self, blocks: Iterable[Block]) -> None:
        """Drop one reference of each block, which a window has passed.

        Most of these are needed only by requests that leave this one's text in the middle. Blocks that another request
        has used are released like others; the rest are evicted first, so that a long prompt does not evict what other
        requests resume with.
        """
        for block in blocks:
            if block.ref_count == 1 and block.block_hash is not None and not block.was_shared:
                block.ref_count = 0
                block.rank = 0.0
                self.free_list.append_before_border(block)
                self.num_evictable += 1
            else:
                self.release((block,))

    def move_to_front(self, block: Block) -> None:
        """Move a free block, whose content the prefix cache dropped, to the front of the free list."""
        if block.ref_count > 0:
            return
        self.free_list.remove(block)
        self.free_list.append_left(block)
        self.num_evictable -= 1

    def devalue(self, block: Block) -> None:
        """Let a cached block, whose content is of no use as long as other content is missing, be evicted first."""
        block.worth = block.rank = 0.0
        if block.ref_count == 0:
            self.free_list.remove(block)
            self.free_list.append_before_border(block)

    def _evict(self, block: Block) -> None:
        self.num_evictable -= 1
        self.level.evicts(block.rank)
        self.on_evict(block)

    # -- memory that moves between kinds ------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[Block]) -> None:
        """Let free cached blocks be evicted after all others."""
        for block in blocks:
            if block.ref_count == 0:
                self.free_list.remove(block)
                self.free_list.append_last(block)

    def rank_of(self, number: int) -> float:
        """Return the rank of the last of the next `number` blocks to be taken: 0 if it has no content, the highest if
        not so many are free."""
        if number > self.num_free:
            return inf
        block = next(islice(self.free_list, number - 1, None))
        return 0.0 if block.block_hash is None else block.rank

    def can_give_back(self, num_blocks: int) -> bool:
        """Whether the last `num_blocks` blocks can be moved: not those that the plan being made has allocated."""
        if num_blocks >= len(self.blocks):
            return False
        last = self.blocks[len(self.blocks) - num_blocks :]
        return not any(block.ref_count and block.allocated_in == self.now for block in last)

    def resize(self, num_blocks: int) -> None:
        """Add blocks behind the last one, or give back as many of the last ones. Their content is moved into blocks
        that would be allocated next, whose own is lost."""
        while len(self.blocks) < num_blocks:
            self.blocks.append(Block(self.id_at(len(self.blocks)), self._worth))
            self.free_list.append_left(self.blocks[-1])
        while len(self.blocks) > num_blocks:
            self._give_back()

    def _give_back(self) -> None:
        last = self.blocks[-1]
        if last.ref_count or last.block_hash is not None:
            place_of = self.free_list.pop_left()
            if place_of.block_hash is not None:
                self._evict(place_of)
            if place_of is not last:
                self.moved.setdefault(last, last.block_id)
                place = place_of.block_id if self._end is None else self._end - 1 - place_of.block_id
                self.blocks[place], last.block_id = last, place_of.block_id
            self.moved.pop(place_of, None)
        else:
            self.free_list.remove(last)
            self.moved.pop(last, None)
        self.blocks.pop()
