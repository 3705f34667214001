"""The prefix cache: maps chained block hashes to blocks, and collects the changes for gateways.

It has no reference to a block: a cached block without references stays in the pool's free list until it is hit again or
evicted. Gateways receive prefix chunks of several whole blocks: the hash of a chunk's last block stands for the whole
chain up to it, because hashes are chained. `pagemill_protocol.hashes` computes hashes and defines the size of a chunk.
Kinds that keep a few blocks only report each, and only while the first kind has it too: so gateways know the first
kind's blocks behind its last whole chunk wherever a sequence may resume.
"""

from __future__ import annotations

from pagemill_engine.kv.block_pool import Block, KVCacheError
from pagemill_protocol import hashes


class PrefixCache:
    def __init__(self, block_size: int, prefix_chunk_blocks: int | None = None) -> None:
        """Create an empty cache.

        `prefix_chunk_blocks`: blocks per prefix chunk; by default the fewest with 64 tokens.
        """
        self._prefix_chunk_blocks = prefix_chunk_blocks or hashes.blocks_per_prefix_chunk(block_size)
        self._blocks: dict[bytes, Block] = {}
        # The net change since the last drain: a chunk added and removed in between is never reported.
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._first: PrefixCache | None = None
        """The first kind's cache, whose blocks this one's have to be in to be reported; None: they need not."""
        self._further: list[PrefixCache] = []
        """The caches that this is the first of."""

    def show_blocks_in(self, further: list[PrefixCache]) -> None:
        """Let the empty caches of further kinds report only blocks that this one has."""
        self._further = further
        for cache in further:
            cache._first = self

    def __len__(self) -> int:
        return len(self._blocks)

    def items(self) -> list[tuple[bytes, Block]]:
        return list(self._blocks.items())

    def get(self, block_hash: bytes) -> Block | None:
        return self._blocks.get(block_hash)

    def insert(self, block: Block, block_hash: bytes, index: int) -> bool:
        """Register a full block. `index`: its position in its chain.

        Returns False if equal content is already cached.
        """
        if block_hash in self._blocks:
            return False
        if block.block_hash is not None:
            raise KVCacheError(f"{block} already stands for other content")
        self._blocks[block_hash] = block
        block.block_hash = block_hash
        block.prefix_chunk_end = (index + 1) % self._prefix_chunk_blocks == 0
        if block.prefix_chunk_end and self._is_shown(block_hash):
            _note(block_hash, self._added, self._removed)
        for cache in self._further:
            if block_hash in cache._blocks:
                _note(block_hash, cache._added, cache._removed)
        return True

    def remove(self, block: Block) -> None:
        block_hash = block.block_hash
        if block_hash is None or self._blocks.pop(block_hash, None) is not block:
            raise KVCacheError(f"{block} is not the cached block of its hash")
        block.block_hash = None
        if block.prefix_chunk_end:
            block.prefix_chunk_end = False
            if self._is_shown(block_hash):
                _note(block_hash, self._removed, self._added)
        for cache in self._further:
            if block_hash in cache._blocks:
                _note(block_hash, cache._removed, cache._added)

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the prefix chunks added and removed since the last call."""
        added, removed = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed

    def snapshot(self) -> list[bytes]:
        """Return all prefix chunks that are cached now."""
        return [name for name, block in self._blocks.items() if block.prefix_chunk_end and self._is_shown(name)]

    def _is_shown(self, block_hash: bytes) -> bool:
        return self._first is None or block_hash in self._first._blocks


def _note(block_hash: bytes, events: dict[bytes, None], opposite: dict[bytes, None]) -> None:
    if block_hash in opposite:
        del opposite[block_hash]
        return
    events[block_hash] = None
