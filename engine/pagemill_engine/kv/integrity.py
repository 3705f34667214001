"""Checks all invariants of the caches: in tests after every operation, in the engine when it is idle.

Costs O(blocks); never called inside a step. A violation is a fault of the engine: `IntegrityError` lists everything
found.
"""

from __future__ import annotations

from collections import Counter

from pagemill_engine.kv.block_pool import Block, KVCacheError
from pagemill_engine.kv.kind_cache import KindCache
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.kv.tables import BlockTable, KindTable, StateTable
from pagemill_protocol import hashes
from pagemill_protocol.report.cache_kinds import first_needed


class IntegrityError(KVCacheError):
    """The state of the caches is inconsistent."""


def check_integrity(kv: CacheManager) -> None:
    """Raise `IntegrityError` unless counts, free lists, hashes, tables and open writes of every kind agree."""
    faults = [*_check_ends(kv), *_check_memory(kv)]
    for number, cache in enumerate(kv.caches):
        faults += [*_check_free_list(cache), *_check_prefix_cache(cache)]
        if cache.kind.state:
            faults += _check_states(kv, cache)
            continue
        tables = {name: (table, table.of_kinds[number]) for name, table in kv.tables.items()}
        held = [block for _, own in tables.values() for block in own.blocks]
        faults += [*_check_references(cache, held), *_check_tables(kv, cache, tables), *_check_writers(kv, tables)]
    if faults:
        raise IntegrityError("; ".join(faults[:20]))


def _check_ends(kv: CacheManager) -> list[str]:
    faults = []
    for name, table in kv.tables.items():
        end = table.sequence.num_computed_tokens + table.num_open_tokens
        num_tokens = len(table.sequence.token_ids) + table.sequence.num_pending_tokens
        if end > num_tokens:
            faults.append(f"{name} has KV for {end} of {num_tokens} tokens")
        if not 0 <= table.end - -(-end // kv.block_size) <= table.num_spare:
            faults.append(f"{name} counts {table.end} blocks for {end} tokens")
        if len(table.sequence.block_hashes) * kv.block_size > len(table.sequence.token_ids):
            faults.append(f"{name} has hashes of tokens that are not known")
        tails = [own.blocks[-1] for own in table.of_kinds if own.blocks]
        if table.tail_is_own and end % kv.block_size and any(tail.ref_count > 1 or tail.block_hash for tail in tails):
            faults.append(f"{name} takes a last block for its own that others may read")
        if table.has_unwritten != any(own.unwritten for own in table.of_kinds):
            faults.append(f"{name} miscounts the blocks that no completed step has written")
    return faults


def _check_memory(kv: CacheManager) -> list[str]:
    """Check that all blocks are within the memory of the cache, and no two of them at one place."""
    faults = [
        f"{cache.kind.name} has block {block.block_id} in place {place}, where {cache.pool.id_at(place)} belongs"
        for cache in kv.caches
        for place, block in enumerate(cache.pool.blocks)
        if block.block_id != cache.pool.id_at(place)
    ]
    num_bytes = sum(cache.pool.num_blocks * cache.kind.block_bytes for cache in kv.caches)
    if num_bytes > kv.split.num_bytes:
        faults.append(f"the blocks of all kinds take {num_bytes} bytes, the cache has {kv.split.num_bytes}")
    return faults


def _check_references(cache: KindCache, blocks: list[Block]) -> list[str]:
    held = Counter(block.block_id for block in blocks)
    return [
        f"block {block.block_id} counts {block.ref_count} references, tables hold {held[block.block_id]}"
        for block in cache.pool.blocks
        if block.ref_count != held[block.block_id]
    ]


def _check_free_list(cache: KindCache) -> list[str]:
    faults, pool = [], cache.pool
    free: list[Block] = []
    for block in pool.free_list:
        free.append(block)
        if len(free) > pool.num_blocks:
            return ["the free list does not end"]
        if block.next is None or block.next.prev is not block or block.prev is None or block.prev.next is not block:
            faults.append(f"the free list is torn at block {block.block_id}")
    free_ids = {block.block_id for block in free}
    if len(free_ids) != len(free):
        faults.append("a block is in the free list twice")
    if len(free) != len(pool.free_list):
        faults.append(f"the free list holds {len(free)} blocks and counts {len(pool.free_list)}")
    for block in pool.blocks:
        if (block.block_id in free_ids) != (block.ref_count == 0):
            where = "free" if block.block_id in free_ids else "not free"
            faults.append(f"block {block.block_id} is {where} with {block.ref_count} references")
    evictable = sum(1 for block in free if block.block_hash is not None)
    if evictable != pool.num_evictable:
        faults.append(f"{evictable} free blocks hold cached content, {pool.num_evictable} are counted")
    cached = [block.block_hash is not None for block in free]
    if cached != sorted(cached):
        faults.append("a cached block would be evicted before a block without content")
    ranks = [block.rank for block in free if block.block_hash is not None]
    if ranks != sorted(ranks):
        faults.append("a block of a higher rank would be evicted before one of a lower rank")
    return faults


def _check_prefix_cache(cache: KindCache) -> list[str]:
    entries = cache.prefixes.items()
    faults = [
        f"a cached hash leads to block {block.block_id}, which does not carry it"
        for block_hash, block in entries
        if block.block_hash != block_hash
    ]
    carriers = sum(1 for block in cache.pool.blocks if block.block_hash is not None)
    if carriers != len(entries):
        faults.append(f"{carriers} blocks carry a hash, the prefix cache knows {len(entries)}")
    return faults


def _check_tables(kv: CacheManager, cache: KindCache, tables: dict[str, tuple[BlockTable, KindTable]]) -> list[str]:
    """Check that each sequence has exactly the blocks that its tokens still need, with the content of its tokens."""
    faults = []
    for name, (table, own) in tables.items():
        first = first_needed(cache.kind, _num_verified(table), kv.block_size)
        if own.first != first or own.first + len(own.blocks) != table.end:
            held = f"{own.first} to {own.first + len(own.blocks)}"
            faults.append(f"{name} holds the {cache.kind.name} blocks {held}, it needs {first} to {table.end}")
        if len({block.block_id for block in own.blocks}) != len(own.blocks):
            faults.append(f"{name} holds a block twice")
        faults += _check_chain(kv, table, own)
    return faults


def _check_chain(kv: CacheManager, table: BlockTable, own: KindTable) -> list[str]:
    """Check that a full block in the prefix cache has the hash of this sequence's tokens up to it."""
    known = table.sequence.block_hashes
    num_full_blocks = (table.sequence.num_computed_tokens + table.num_open_tokens) // kv.block_size
    return [
        f"{table.sequence.request_id} holds at {index} a block cached for other content"
        for index, block in enumerate(own.blocks[: max(0, num_full_blocks - own.first)], start=own.first)
        if block.block_hash is not None and (index >= len(known) or known[index] != block.block_hash)
    ]


def _check_writers(kv: CacheManager, tables: dict[str, tuple[BlockTable, KindTable]]) -> list[str]:
    """Check that every block that a step writes has one writer and no untimely reader.

    Only sequences that hit the block since that step was planned may read it.
    """
    faults = []
    writers: dict[int, str] = {}
    for name, (table, own) in tables.items():
        end = table.sequence.num_computed_tokens + table.num_open_tokens
        start = _num_verified(table)
        if start == end:
            continue
        for index in range(start // kv.block_size, min(-(-end // kv.block_size), own.first + len(own.blocks))):
            block = own.at(index)
            if block.block_id in writers:
                faults.append(f"{name} and {writers[block.block_id]} both write block {block.block_id}")
            writers[block.block_id] = name
            if index in own.unwritten:
                continue
            if block.ref_count > 1 or block.block_hash is not None:
                faults.append(f"{name} writes block {block.block_id}, which others may read")
    return faults


def _check_states(kv: CacheManager, cache: KindCache) -> list[str]:
    """Check that each sequence has the newest state of its verified tokens, and those that steps write."""
    faults = _check_references(cache, [fold.block for own in _states(kv) for fold in own.folds])
    for name, table in kv.tables.items():
        own, sequence = table.state, table.sequence
        if own is None:
            faults.append(f"{name} has no table of states")
            continue
        known = hashes.extend([], sequence.cache_root, sequence.token_ids, kv.block_size)
        end, verified = table.sequence.num_computed_tokens + table.num_open_tokens, _num_verified(table)
        boundaries = [fold.boundary for fold in own.folds]
        if boundaries != sorted(set(boundaries)) or own.boundary * kv.block_size > end:
            faults.append(f"{name} has states behind {boundaries} blocks and computes {end} tokens")
        if own.boundary < end // kv.block_size and table.tail_is_own:
            faults.append(f"{name} misses the state behind {end // kv.block_size} blocks")
        if sum(fold.num_tokens <= verified for fold in own.folds) > 1:
            faults.append(f"{name} has more than the newest state of {verified} tokens: {boundaries}")
        for place, fold in enumerate(own.folds):
            found, index = fold.block.block_hash, fold.boundary - 1
            if found is not None and (index >= len(known) or known[index] != found):
                faults.append(f"{name} has behind {fold.boundary} blocks a state cached for other content")
            is_written = fold.num_tokens > verified
            if is_written and place >= len(own.folds) - own.num_opened and (found or fold.block.ref_count > 1):
                faults.append(f"{name} writes state {fold.block.block_id}, which others may read")
            if is_written and found is not None and not fold.unwritten:
                faults.append(f"{name} takes state {fold.block.block_id} for written before its step was read")
    return faults


def _states(kv: CacheManager) -> list[StateTable]:
    return [table.state for table in kv.tables.values() if table.state is not None]


def _num_verified(table: BlockTable) -> int:
    """Return how many of the sequence's tokens completed steps have computed."""
    return table.sequence.num_computed_tokens - table.num_launched_tokens
