"""Checks all invariants of the KV cache: in tests after every operation, in the engine when it is idle.

Costs O(blocks); never called inside a step. A violation is a fault of the engine: `IntegrityError` lists everything
found.
"""

from __future__ import annotations

from collections import Counter

from pagemill_engine.kv.block_pool import Block, KVCacheError
from pagemill_engine.kv.manager import BlockTable, KVCacheManager


class IntegrityError(KVCacheError):
    """The state of the KV cache is inconsistent."""


def check_integrity(kv: KVCacheManager) -> None:
    """Raise `IntegrityError` unless counts, free list, hashes, tables and open writes agree."""
    faults = [
        *_check_references(kv),
        *_check_free_list(kv),
        *_check_prefix_cache(kv),
        *_check_tables(kv),
        *_check_writers(kv),
    ]
    if faults:
        raise IntegrityError("; ".join(faults[:20]))


def _check_references(kv: KVCacheManager) -> list[str]:
    held = Counter(block.block_id for table in kv.tables.values() for block in table.blocks)
    return [
        f"block {block.block_id} counts {block.ref_count} references, tables hold {held[block.block_id]}"
        for block in kv.pool.blocks
        if block.ref_count != held[block.block_id]
    ]


def _check_free_list(kv: KVCacheManager) -> list[str]:
    faults = []
    free: list[Block] = []
    for block in kv.pool.free_list:
        free.append(block)
        if len(free) > kv.pool.num_blocks:
            return ["the free list does not end"]
        if block.next is None or block.next.prev is not block or block.prev is None or block.prev.next is not block:
            faults.append(f"the free list is torn at block {block.block_id}")
    free_ids = {block.block_id for block in free}
    if len(free_ids) != len(free):
        faults.append("a block is in the free list twice")
    if len(free) != len(kv.pool.free_list):
        faults.append(f"the free list holds {len(free)} blocks and counts {len(kv.pool.free_list)}")
    for block in kv.pool.blocks:
        if (block.block_id in free_ids) != (block.ref_count == 0):
            where = "free" if block.block_id in free_ids else "not free"
            faults.append(f"block {block.block_id} is {where} with {block.ref_count} references")
    evictable = sum(1 for block in free if block.block_hash is not None)
    if evictable != kv.pool.num_evictable:
        faults.append(f"{evictable} free blocks hold cached content, {kv.pool.num_evictable} are counted")
    cached = [block.block_hash is not None for block in free]
    if cached != sorted(cached):
        faults.append("a cached block would be evicted before a block without content")
    return faults


def _check_prefix_cache(kv: KVCacheManager) -> list[str]:
    entries = kv.prefix_cache.items()
    faults = [
        f"a cached hash leads to block {block.block_id}, which does not carry it"
        for block_hash, block in entries
        if block.block_hash != block_hash
    ]
    carriers = sum(1 for block in kv.pool.blocks if block.block_hash is not None)
    if carriers != len(entries):
        faults.append(f"{carriers} blocks carry a hash, the prefix cache knows {len(entries)}")
    return faults


def _check_tables(kv: KVCacheManager) -> list[str]:
    faults = []
    for name, table in kv.tables.items():
        end = table.sequence.num_computed_tokens + table.num_open_tokens
        num_tokens = len(table.sequence.token_ids) + table.sequence.num_pending_tokens
        if end > num_tokens:
            faults.append(f"{name} has KV for {end} of {num_tokens} tokens")
        if len(table.blocks) != kv.blocks_for(end):
            faults.append(f"{name} holds {len(table.blocks)} blocks for {end} tokens")
        if len({block.block_id for block in table.blocks}) != len(table.blocks):
            faults.append(f"{name} holds a block twice")
        faults += _check_chain(kv, table)
    return faults


def _check_chain(kv: KVCacheManager, table: BlockTable) -> list[str]:
    """Check that a full block in the prefix cache has the hash of this sequence's tokens up to it."""
    known = table.sequence.block_hashes
    num_full_blocks = (table.sequence.num_computed_tokens + table.num_open_tokens) // kv.block_size
    return [
        f"{table.sequence.request_id} holds at {index} a block cached for other content"
        for index, block in enumerate(table.blocks[:num_full_blocks])
        if block.block_hash is not None and (index >= len(known) or known[index] != block.block_hash)
    ]


def _check_writers(kv: KVCacheManager) -> list[str]:
    """Check that every block that a step writes has one writer and no untimely reader.

    Only sequences that hit the block since that step was planned may read it.
    """
    faults = []
    writers: dict[int, str] = {}
    for name, table in kv.tables.items():
        end = table.sequence.num_computed_tokens + table.num_open_tokens
        start = table.sequence.num_computed_tokens - table.num_launched_tokens
        if start == end:
            continue
        for index in range(start // kv.block_size, kv.blocks_for(end)):
            block = table.blocks[index]
            if block.block_id in writers:
                faults.append(f"{name} and {writers[block.block_id]} both write block {block.block_id}")
            writers[block.block_id] = name
            if index in table.unwritten:
                continue
            if block.ref_count > 1 or block.block_hash is not None:
                faults.append(f"{name} writes block {block.block_id}, which others may read")
    return faults
