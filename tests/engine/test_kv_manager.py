"""Block tables: prefix hits, forks, copy-on-write, and an integrity check that detects planted faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kv_machine import Row

from pagemill_engine.kv.block_pool import KVCacheError
from pagemill_engine.kv.integrity import IntegrityError, check_integrity
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.kv.tables import NO_MATCH, NO_NEW_BLOCKS
from pagemill_protocol.report.cache_kinds import FULL, CacheKind


def make_kv(num_blocks: int = 16, *, caching: bool = True) -> CacheManager:
    return CacheManager(num_blocks, 4, enable_prefix_caching=caching)


def block_ids(kv: CacheManager, row: Row) -> list[int]:
    ((_, found),) = kv.held_blocks(row)
    return found


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


def compute(kv: CacheManager, row: Row, num_tokens: int | None = None) -> None:
    """Start the row if necessary, and write its next tokens."""
    if not kv.has_table(row):
        kv.start(row, kv.match(row))
    due = len(row.token_ids) - row.num_computed_tokens
    num_tokens = num_tokens if num_tokens is not None else due
    assert kv.allocate(row, num_tokens) is not None
    run(kv, {row: num_tokens})
    check_integrity(kv)


def run(kv: CacheManager, writes: dict[Row, int]) -> None:
    """Launch and read the step with these writes."""
    kv.launch([row.request_id for row in writes])
    for row, num_tokens in writes.items():
        kv.commit(row, num_tokens)


def test_only_the_blocks_of_the_step_are_allocated() -> None:
    kv = make_kv()
    row = Row("a", prompt(13))
    compute(kv, row, 5)
    assert len(block_ids(kv, row)) == 2
    compute(kv, row, 3)
    assert len(block_ids(kv, row)) == 2
    compute(kv, row, 5)
    assert len(block_ids(kv, row)) == 4


def test_an_allocation_without_enough_blocks_changes_nothing() -> None:
    kv = make_kv(3)
    first = Row("a", prompt(8))
    compute(kv, first)
    second = Row("b", prompt(8, first=50))
    kv.start(second, NO_MATCH)
    assert kv.allocate(second, 8) is None
    assert len(block_ids(kv, second)) == 0
    assert kv.caches[0].pool.num_free == 1
    check_integrity(kv)


@pytest.mark.parametrize("num_tokens", [4, 8, 9, 12])
def test_a_full_hit_leaves_the_last_token_to_compute(num_tokens: int) -> None:
    kv = make_kv()
    compute(kv, Row("a", prompt(num_tokens)))
    again = Row("b", prompt(num_tokens))
    kv.start(again, kv.match(again))
    assert again.num_computed_tokens == (num_tokens - 1) // 4 * 4


def test_a_hit_ends_at_the_first_difference() -> None:
    kv = make_kv()
    compute(kv, Row("a", prompt(16)))
    other = Row("b", [*prompt(6), 99, *prompt(9, first=7)])
    assert kv.match(other).num_tokens == 4


def test_different_roots_separate_equal_prompts() -> None:
    kv = make_kv()
    compute(kv, Row("a", prompt(16)))
    assert kv.match(Row("b", prompt(16), cache_root=b"tenant")) == NO_MATCH


def test_without_a_prefix_cache_there_are_no_hits() -> None:
    kv = make_kv(caching=False)
    compute(kv, Row("a", prompt(16)))
    assert kv.match(Row("b", prompt(16))) == NO_MATCH
    assert len(kv.caches[0].prefixes) == 0


def test_freed_blocks_can_be_hit_until_they_are_evicted() -> None:
    kv = make_kv(4)
    row = Row("a", prompt(16))
    compute(kv, row)
    kv.free(row)
    assert kv.caches[0].pool.num_evictable == 4
    assert kv.match(Row("b", prompt(20))).num_tokens == 16
    compute(kv, Row("c", prompt(5, first=90)))
    # The end of the chain is evicted first, so its beginning is still valid.
    assert kv.match(Row("d", prompt(20))).num_tokens == 8
    check_integrity(kv)


def test_a_row_can_hit_blocks_that_the_same_step_writes() -> None:
    kv = make_kv()
    writer, reader = Row("a", prompt(10)), Row("b", prompt(10))
    kv.start(writer, NO_MATCH)
    assert kv.allocate(writer, 10) is not None
    kv.start(reader, kv.match(reader))
    assert reader.num_computed_tokens == 8
    assert kv.allocate(reader, 2) is not None
    check_integrity(kv)
    run(kv, {writer: 10, reader: 2})
    check_integrity(kv)


def test_a_block_completed_by_an_unknown_token_can_be_hit_once_the_token_is_known() -> None:
    kv = make_kv()
    row = Row("a", prompt(7))
    compute(kv, row)
    row.num_pending_tokens = 1
    assert kv.allocate(row, 1) is not None
    kv.launch(["a"])
    check_integrity(kv)
    assert len(kv.caches[0].prefixes) == 1
    row.token_ids.append(7)
    row.num_pending_tokens = 0
    kv.commit(row, 1)
    check_integrity(kv)
    assert kv.match(Row("b", prompt(9))).num_tokens == 8


def test_blocks_of_a_step_in_flight_cannot_be_hit_after_their_row_left() -> None:
    kv = make_kv()
    row = Row("a", prompt(12))
    kv.start(row, NO_MATCH)
    for num_tokens in (5, 7):
        assert kv.allocate(row, num_tokens) is not None
        kv.launch(["a"])
    check_integrity(kv)
    assert row.num_computed_tokens == 12
    kv.commit(row, 5)
    check_integrity(kv)
    kv.free(row)
    check_integrity(kv)
    assert kv.match(Row("b", prompt(13))).num_tokens == 4


def test_blocks_of_a_row_without_a_table_can_be_invalidated() -> None:
    kv = make_kv()
    row = Row("a", prompt(12))
    compute(kv, row)
    kv.free(row)
    assert kv.invalidate(row) == set()
    check_integrity(kv)
    assert len(kv.caches[0].prefixes) == 0


def test_a_row_that_a_step_writes_cannot_be_forked() -> None:
    kv = make_kv()
    row = Row("a", prompt(9))
    compute(kv, row, 6)
    assert kv.allocate(row, 3) is not None
    kv.launch(["a"])
    with pytest.raises(KVCacheError, match="still writes"):
        kv.fork(row, Row("b", prompt(9)), 5)
    with pytest.raises(KVCacheError, match="more tokens are committed"):
        kv.commit(row, 4)


def test_published_blocks_that_were_not_written_are_withdrawn() -> None:
    kv = make_kv()
    row = Row("a", prompt(10))
    kv.start(row, NO_MATCH)
    assert kv.allocate(row, 10) is not None
    kv.free(row)
    check_integrity(kv)
    assert kv.match(Row("b", prompt(10))) == NO_MATCH
    assert kv.caches[0].pool.num_evictable == 0
    assert kv.caches[0].prefixes.drain_events() == ([], [])


def test_blocks_of_a_failed_row_cannot_be_hit() -> None:
    kv = make_kv()
    row = Row("a", prompt(12))
    compute(kv, row, 8)
    assert kv.allocate(row, 4) is not None
    assert {block.block_id for block in kv.invalidate(row)} == {block_ids(kv, row)[2]}
    kv.free(row)
    check_integrity(kv)
    assert kv.match(Row("b", prompt(12))) == NO_MATCH


def test_a_fork_shares_all_blocks_and_copies_the_partial_one_on_write() -> None:
    kv = make_kv()
    parent, child = Row("p", prompt(7)), Row("c", prompt(7))
    compute(kv, parent)
    kv.fork(parent, child, 6)
    assert block_ids(kv, child) == block_ids(kv, parent)
    assert kv.caches[0].pool.num_active == 2
    shared = block_ids(kv, parent)[1]
    allocation = kv.allocate(child, 1)
    assert allocation is not None
    assert allocation[0].replaced == (1, shared, block_ids(kv, child)[1])
    assert block_ids(kv, child)[1] != shared
    assert block_ids(kv, parent)[1] == shared
    run(kv, {child: 1})
    check_integrity(kv)


def test_the_last_user_of_a_partial_block_writes_in_place() -> None:
    kv = make_kv()
    parent, child = Row("p", prompt(7)), Row("c", prompt(7))
    compute(kv, parent)
    kv.fork(parent, child, 6)
    kv.free(parent)
    allocation = kv.allocate(child, 1)
    assert allocation is NO_NEW_BLOCKS


def test_a_block_that_can_be_hit_is_never_written_in_place() -> None:
    kv = make_kv()
    parent, child = Row("p", prompt(8)), Row("c", prompt(8))
    compute(kv, parent)
    kv.fork(parent, child, 7)
    kv.free(parent)
    allocation = kv.allocate(child, 1)
    assert allocation is not None
    assert allocation[0].replaced is not None
    run(kv, {child: 1})
    check_integrity(kv)


def test_a_fork_requires_computed_tokens() -> None:
    kv = make_kv()
    parent = Row("p", prompt(8))
    compute(kv, parent, 4)
    with pytest.raises(KVCacheError, match="computed 4 of 7"):
        kv.fork(parent, Row("c", prompt(8)), 7)


def test_waste_is_the_number_of_unused_slots_in_last_blocks() -> None:
    kv = make_kv()
    first, second = Row("a", prompt(5)), Row("b", prompt(8, first=50))
    compute(kv, first)
    compute(kv, second)
    usage = kv.slot_usage()
    assert usage.allocated_slots == 16
    assert usage.used_slots == 13
    assert usage.waste == pytest.approx(3 / 16)
    twin = Row("c", prompt(5))
    kv.fork(first, twin, 4)
    assert kv.slot_usage() == usage


def test_misuse_raises_an_error() -> None:
    kv = make_kv()
    row = Row("a", prompt(5))
    kv.start(row, NO_MATCH)
    with pytest.raises(KVCacheError, match="already has a block table"):
        kv.start(row, NO_MATCH)
    with pytest.raises(KVCacheError, match="6 tokens asked for, 5 are due"):
        kv.allocate(row, 6)
    kv.allocate(row, 2)
    with pytest.raises(KVCacheError, match="already being written"):
        kv.allocate(row, 2)


def test_reset_drops_cached_content_and_keeps_block_tables() -> None:
    kv = make_kv()
    running, done = Row("a", prompt(9)), Row("b", prompt(9, first=50))
    compute(kv, running)
    compute(kv, done)
    kv.free(done)
    kv.reset_prefix_cache()
    check_integrity(kv)
    assert kv.caches[0].pool.num_evictable == 0
    assert len(block_ids(kv, running)) == 3
    assert kv.match(Row("c", prompt(9))) == NO_MATCH


def _lose_reference(kv: CacheManager) -> None:
    next(iter(kv.tables.values())).of_kinds[0].blocks[0].ref_count -= 1


def _leak_block(kv: CacheManager) -> None:
    kv.caches[0].pool.free_list.pop_left()


def _free_used_block(kv: CacheManager) -> None:
    kv.caches[0].pool.free_list.append(next(iter(kv.tables.values())).of_kinds[0].blocks[0])


def _tear_list(kv: CacheManager) -> None:
    next(iter(kv.caches[0].pool.free_list)).prev = None


def _miscount_evictable(kv: CacheManager) -> None:
    kv.caches[0].pool.num_evictable += 1


def _stale_hash(kv: CacheManager) -> None:
    kv.caches[0].prefixes.items()[0][1].block_hash = b"other"


def _foreign_block(kv: CacheManager) -> None:
    first, second = (table.of_kinds[0] for table in list(kv.tables.values())[:2])
    second.blocks[0] = first.blocks[0]
    first.blocks[0].ref_count += 1


def _extra_block(kv: CacheManager) -> None:
    next(iter(kv.tables.values())).of_kinds[0].blocks += kv.caches[0].pool.allocate(1)


def _two_writers(kv: CacheManager) -> None:
    first, second = list(kv.tables.values())[:2]
    mine, theirs = first.of_kinds[0].blocks, second.of_kinds[0].blocks
    kv.caches[0].pool.release(theirs[-1:])
    theirs[-1] = mine[-1]
    mine[-1].ref_count += 1
    first.num_open_tokens = second.num_open_tokens = 1
    for table in (first, second):
        table.sequence.token_ids.append(1)


def _write_into_shared_block(kv: CacheManager) -> None:
    table = next(iter(kv.tables.values()))
    twin = Row("twin", list(table.sequence.token_ids))
    kv.fork(table.sequence, twin, 5)
    table.sequence.token_ids.append(1)
    table.num_open_tokens = 1


def _computed_beyond_tokens(kv: CacheManager) -> None:
    next(iter(kv.tables.values())).sequence.token_ids.pop()


@pytest.mark.parametrize(
    "plant",
    [
        _lose_reference,
        _leak_block,
        _free_used_block,
        _tear_list,
        _miscount_evictable,
        _stale_hash,
        _foreign_block,
        _extra_block,
        _two_writers,
        _write_into_shared_block,
        _computed_beyond_tokens,
    ],
)
def test_the_integrity_check_detects_a_planted_fault(plant: Callable[[CacheManager], None]) -> None:
    kv = make_kv()
    compute(kv, Row("a", prompt(6)))
    compute(kv, Row("b", prompt(6, first=50)))
    gone = Row("c", prompt(6, first=80))
    compute(kv, gone)
    kv.free(gone)
    check_integrity(kv)
    plant(kv)
    with pytest.raises(IntegrityError):
        check_integrity(kv)


def test_a_long_prompt_does_not_evict_the_windows_that_others_resume_with() -> None:
    """Three conversations of 10 blocks leave 3 blocks of their windows each; a fourth passes 16 blocks of the kind."""
    kinds = [FULL, CacheKind("window", 9)]
    kv = CacheManager([200, 16], 4, kinds=kinds, max_step_tokens=8)
    for number in range(3):
        row = Row(f"r{number}", prompt(41, first=100 * number))
        while row.num_computed_tokens < 41:
            compute(kv, row, min(8, 41 - row.num_computed_tokens))
        kv.free(row)
    row = Row("long", prompt(64, first=900))
    while row.num_computed_tokens < 64:
        compute(kv, row, 8)
    for number in range(3):
        assert kv.match(Row("again", prompt(50, first=100 * number))).num_tokens == 40
