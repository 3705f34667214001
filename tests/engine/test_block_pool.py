"""The block pool allocates blocks by reference count and evicts cached ones in the right order."""

from __future__ import annotations

import pytest

from pagemill_engine.kv.block_pool import Block, BlockPool, KVCacheError


def make_pool(num_blocks: int = 8) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []

    def forget(block: Block) -> None:
        evicted.append(block.block_id)
        block.block_hash = None

    return BlockPool(num_blocks, on_evict=forget), evicted


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def cache(blocks: list[Block]) -> None:
    for block in blocks:
        block.block_hash = b"content-%d" % block.block_id


def test_every_block_is_allocated_once() -> None:
    pool, _ = make_pool(8)
    taken = pool.allocate(8)
    assert sorted(ids(taken)) == list(range(8))
    assert pool.num_free == 0
    assert pool.num_active == 8
    assert all(block.ref_count == 1 for block in taken)


def test_an_allocation_beyond_the_free_blocks_is_refused_and_changes_nothing() -> None:
    pool, _ = make_pool(4)
    pool.allocate(3)
    with pytest.raises(KVCacheError, match="2 blocks asked for, 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(KVCacheError, match="at least one block"):
        make_pool(0)


def test_a_block_is_freed_with_its_last_reference_only() -> None:
    pool, _ = make_pool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_a_second_free_is_refused() -> None:
    pool, _ = make_pool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(KVCacheError, match="freed twice"):
        pool.release(blocks)


def test_blocks_without_content_are_allocated_before_cached_ones() -> None:
    pool, evicted = make_pool(4)
    cached, plain = pool.allocate(2), pool.allocate(2)
    cache(cached)
    pool.release(plain)
    pool.release(cached)
    assert pool.num_evictable == 2
    assert sorted(ids(pool.allocate(2))) == sorted(ids(plain))
    assert evicted == []


def test_the_least_recently_used_content_is_evicted_first() -> None:
    pool, evicted = make_pool(4)
    blocks = pool.allocate(4)
    cache(blocks)
    for index in (2, 0, 3, 1):
        pool.release([blocks[index]])
    pool.share([blocks[0]])
    pool.release([blocks[0]])
    pool.allocate(4)
    assert evicted == ids([blocks[2], blocks[3], blocks[1], blocks[0]])
    assert pool.num_evictable == 0


def test_cached_content_in_the_free_list_can_be_used_again() -> None:
    pool, evicted = make_pool(3)
    blocks = pool.allocate(3)
    cache(blocks)
    pool.release(blocks)
    pool.share([blocks[1]])
    assert [block.block_id for block in pool.free_list] == ids([blocks[0], blocks[2]])
    assert pool.num_evictable == 2
    assert blocks[1].block_hash is not None
    assert evicted == []


def test_a_free_block_whose_content_is_dropped_is_allocated_next() -> None:
    pool, _ = make_pool(3)
    blocks = pool.allocate(3)
    cache(blocks)
    pool.release(blocks)
    blocks[2].block_hash = None
    pool.move_to_front(blocks[2])
    assert pool.num_evictable == 2
    assert ids(pool.allocate(1)) == [blocks[2].block_id]


def test_what_a_window_has_passed_is_evicted_first_unless_another_request_used_it() -> None:
    pool, evicted = make_pool(6)
    old, used, passed, last = pool.allocate(1), pool.allocate(1), pool.allocate(2), pool.allocate(1)
    cache([*old, *used, *passed, *last])
    pool.release(old)
    pool.share(used)
    pool.release(used)
    pool.release_passed(used)
    pool.release_passed(passed)
    pool.release(last)
    assert (pool.num_free, pool.num_evictable) == (6, 5)
    pool.allocate(6)
    assert evicted == ids([*passed, *old, *used, *last])


def test_a_passed_block_that_others_hold_stays_in_use() -> None:
    pool, _ = make_pool(2)
    blocks = pool.allocate(1)
    cache(blocks)
    pool.share(blocks)
    pool.release_passed(blocks)
    assert (pool.num_free, blocks[0].ref_count) == (1, 1)


def test_what_is_worth_more_stays_until_as_much_was_evicted() -> None:
    pool, evicted = make_pool(4)
    dear, *others = pool.allocate(4)
    cache([dear, *others])
    dear.worth = 3.5
    pool.release([dear, *others])
    for generation in range(1, 4):
        fresh = pool.allocate(3)
        assert evicted == ids(others), "the level has not reached what it is worth"
        assert pool.level.rank == generation
        cache(fresh)
        pool.release(fresh)
        evicted.clear()
    pool.allocate(1)
    assert evicted == [dear.block_id]


def test_content_that_lost_its_use_is_evicted_first() -> None:
    pool, evicted = make_pool(3)
    blocks = pool.allocate(3)
    cache(blocks)
    pool.release(blocks)
    pool.devalue(blocks[2])
    assert pool.num_evictable == 3
    pool.allocate(2)
    assert evicted == ids([blocks[2], blocks[0]])
