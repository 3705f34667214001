"""Faults that are planted into the cache manager fail the state machine or the integrity check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kv_machine import walk

from pagemill_engine.kv import manager
from pagemill_engine.kv.block_pool import KVCacheError
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.kv.tables import BlockTable, Match
from pagemill_protocol.report.cache_kinds import CacheKind, first_needed, longest_match

real_start, real_allocate, real_commit = CacheManager.start, CacheManager.allocate, CacheManager.commit


def _free_a_block_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(kind: CacheKind, num_tokens: int, block_size: int) -> int:
        if kind.window is None:
            return 0
        return first_needed(kind, num_tokens + block_size, block_size)

    monkeypatch.setattr(manager, "first_needed", early)


def _keep_blocks_behind_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheManager, "_drop_behind", lambda *arguments: None)


def _reference_hits_after_another_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: CacheManager, sequence: Any, match: Match) -> None:
        for table in self.tables.values():
            other: Any = table.sequence
            due = len(other.token_ids) + other.num_pending_tokens - other.num_computed_tokens
            if due > 0 and not other.open_tokens and table.tail_is_own and real_allocate(self, other, due) is not None:
                other.open_tokens = due
        real_start(self, sequence, match)

    monkeypatch.setattr(CacheManager, "start", start)


def _hash_a_token_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(self: CacheManager, sequence: Any, num_tokens: int) -> Any:
        allocation = real_allocate(self, sequence, num_tokens)
        table = self.tables[sequence.request_id]
        num_full = (sequence.num_computed_tokens + num_tokens) // self.block_size
        if allocation is not None and num_full > table.num_registered:
            self._register(table, num_full, written=False)
        return allocation

    monkeypatch.setattr(CacheManager, "allocate", allocate)


def _take_blocks_of_one_kind_when_another_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(self: CacheManager, sequence: Any, num_tokens: int) -> Any:
        allocation = real_allocate(self, sequence, num_tokens)
        if allocation is None and self.caches[0].pool.num_free:
            self.tables[sequence.request_id].of_kinds[0].blocks += self.caches[0].pool.allocate(1)
        return allocation

    monkeypatch.setattr(CacheManager, "allocate", allocate)


def _write_a_shared_block_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    real_fork = CacheManager.fork

    def fork(self: CacheManager, parent: Any, child: Any, num_tokens: int) -> int:
        resumed = real_fork(self, parent, child, num_tokens)
        self.tables[parent.request_id].tail_is_own = True
        return resumed

    monkeypatch.setattr(CacheManager, "fork", fork)


def _count_pending_tokens_as_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    real_drop = CacheManager._drop_behind

    def drop(self: CacheManager, number: int, table: BlockTable, num_verified: int) -> None:
        real_drop(self, number, table, table.sequence.num_computed_tokens)

    monkeypatch.setattr(CacheManager, "_drop_behind", drop)


def _match_one_kind_only(monkeypatch: pytest.MonkeyPatch) -> None:

    def longest(kinds: Any, num_blocks: int, block_size: int, cached: Any) -> int:
        return longest_match(kinds[:1], num_blocks, block_size, cached)

    monkeypatch.setattr(manager, "longest_match", longest)


def _commit_a_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: CacheManager, sequence: Any, num_tokens: int) -> None:
        real_commit(self, sequence, num_tokens)
        if self.tables[sequence.request_id].num_launched_tokens:
            self.tables[sequence.request_id].num_launched_tokens -= 1

    monkeypatch.setattr(CacheManager, "commit", commit)


def walk_often() -> None:
    for seed in range(60):
        walk(seed)


def test_without_a_fault_the_same_walks_find_nothing() -> None:
    walk_often()


@pytest.mark.parametrize(
    "plant",
    [
        _free_a_block_early,
        _keep_blocks_behind_the_window,
        _reference_hits_after_another_allocates,
        _hash_a_token_that_is_not_known,
        _take_blocks_of_one_kind_when_another_has_none,
        _write_a_shared_block_after_a_fork,
        _count_pending_tokens_as_verified,
        _match_one_kind_only,
        _commit_a_token_too_many,
    ],
)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KVCacheError, KeyError)):
        walk_often()
