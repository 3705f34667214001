"""The prefix cache: chained block hash -> block, and what of it the gateways should hear.

Holds no reference to a block: a cached block whose count is zero lies in the pool's free list until it is found again
or taken. Gateways are told in granules of whole blocks: the hash of a granule's last block stands for the whole chain
up to it (hashes are chained). Hashing itself, and how large a granule is, are `pagemill_protocol.hashes`.
"""

from __future__ import annotations

from pagemill_engine.kv.block_pool import Block, KVCacheError
from pagemill_protocol import hashes


class PrefixCache:
    def __init__(self, block_size: int, granule_blocks: int | None = None) -> None:
        """`granule_blocks`: default the fewest that hold 64 tokens."""
        self._granule_blocks = granule_blocks or hashes.blocks_per_granule(block_size)
        self._blocks: dict[bytes, Block] = {}
        # Net change since the last drain: a granule added and removed in between is never reported.
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def items(self) -> list[tuple[bytes, Block]]:
        return list(self._blocks.items())

    def get(self, block_hash: bytes) -> Block | None:
        return self._blocks.get(block_hash)

    def insert(self, block: Block, block_hash: bytes, index: int) -> bool:
        """Make a full block findable; `index` is its place in its chain. False: equal content is already cached."""
        if block_hash in self._blocks:
            return False
        if block.block_hash is not None:
            raise KVCacheError(f"{block} already stands for other content")
        self._blocks[block_hash] = block
        block.block_hash = block_hash
        block.granule_end = (index + 1) % self._granule_blocks == 0
        if block.granule_end:
            _note(block_hash, self._added, self._removed)
        return True

    def remove(self, block: Block) -> None:
        block_hash = block.block_hash
        if block_hash is None or self._blocks.pop(block_hash, None) is not block:
            raise KVCacheError(f"{block} is not the cached block of its hash")
        block.block_hash = None
        if block.granule_end:
            block.granule_end = False
            _note(block_hash, self._removed, self._added)

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Granules added and removed since the call before."""
        added, removed = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed

    def snapshot(self) -> list[bytes]:
        """All granules cached now."""
        return [block_hash for block_hash, block in self._blocks.items() if block.granule_end]


def _note(block_hash: bytes, events: dict[bytes, None], opposite: dict[bytes, None]) -> None:
    if block_hash in opposite:
        del opposite[block_hash]
        return
    events[block_hash] = None
