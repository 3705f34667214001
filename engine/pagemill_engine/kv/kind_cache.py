"""The pool and the prefix cache of one cache kind, which the cache manager keeps in step with those of other kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagemill_engine.kv.block_pool import Block, BlockPool
from pagemill_engine.kv.prefix_cache import PrefixCache
from pagemill_protocol.report.cache_kinds import CacheKind


class KindCache:
    def __init__(
        self,
        kind: CacheKind,
        num_blocks: int,
        end: int | None,
        prefix_chunk_blocks: int,
        block_size: int,
        worth: float,
    ) -> None:
        """Create an empty cache. `end`: if ids of blocks fall. `worth`: of a block, in tokens per byte."""
        self.kind = kind
        self.prefixes = PrefixCache(block_size, prefix_chunk_blocks)
        self.pool = BlockPool(num_blocks, on_evict=self.prefixes.remove, end=end, worth=worth)
        self.watermark = watermark_blocks(num_blocks)

    def cached_again(self, block_hashes: Sequence[bytes], indices: range) -> list[Block] | None:
        """Return the blocks that a sequence with these hashes has dropped, or None if one is not cached any more."""
        found = []
        for index in indices:
            block = self.prefixes.get(block_hashes[index]) if index < len(block_hashes) else None
            if block is None:
                return None
            found.append(block)
        return found

    def forget(self, blocks: Iterable[Block]) -> None:
        """Remove the blocks' content from the prefix cache."""
        for block in blocks:
            if block.block_hash is not None:
                self.prefixes.remove(block)
                self.pool.move_to_front(block)


def watermark_blocks(num_blocks: int) -> int:
    """Return how many of `num_blocks` stay free when another request starts, so that the running ones can continue for
    a while."""
    return max(1, num_blocks // 100)
