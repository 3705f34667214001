"""Faults that are planted into the cache manager fail the state machine or the integrity check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from kv_machine import walk

from pagemill_engine.kv import manager
from pagemill_engine.kv.block_pool import BlockPool, KVCacheError
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.kv.split import Moves, MovingSplit
from pagemill_engine.kv.states import States
from pagemill_engine.kv.tables import BlockTable, Fold, Match, StateTable
from pagemill_protocol.report.cache_kinds import CacheKind, first_needed, longest_match

real_fold, real_take_moves = States.fold, MovingSplit.take_moves
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
    def start(self: CacheManager, sequence: Any, match: Match, points: Any = ()) -> None:
        for table in self.tables.values():
            other: Any = table.sequence
            due = len(other.token_ids) + other.num_pending_tokens - other.num_computed_tokens
            if due > 0 and not other.open_tokens and table.tail_is_own and real_allocate(self, other, due) is not None:
                other.open_tokens = due
        real_start(self, sequence, match, points)

    monkeypatch.setattr(CacheManager, "start", start)


def _hash_a_token_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(self: CacheManager, sequence: Any, num_tokens: int, num_proposed: int = 0) -> Any:
        allocation = real_allocate(self, sequence, num_tokens, num_proposed)
        table = self.tables[sequence.request_id]
        num_full = (sequence.num_computed_tokens + num_tokens) // self.block_size
        if allocation is not None and num_full > table.num_registered:
            self._register(table, num_full, written=False)
        return allocation

    monkeypatch.setattr(CacheManager, "allocate", allocate)


def _take_blocks_of_one_kind_when_another_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(self: CacheManager, sequence: Any, num_tokens: int, num_proposed: int = 0) -> Any:
        allocation = real_allocate(self, sequence, num_tokens, num_proposed)
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


def _fold_a_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "fold", lambda self, own, end, sequence: real_fold(self, own, end - 1, sequence))


def _fold_in_place_of_a_shared_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "lacks_own", lambda self, own: not own.folds)


def _show_a_state_within_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fold(self: States, own: StateTable, num_tokens: int, sequence: Any) -> list[tuple[int, int]]:
        placed = real_fold(self, own, num_tokens, sequence)
        for each in own.folds[len(own.folds) - own.num_opened :]:
            each.unwritten = self._insert(own, each, sequence)
        return placed

    monkeypatch.setattr(States, "fold", fold)


def _fold_proposed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    real_extend = CacheManager._extend
    monkeypatch.setattr(
        CacheManager, "_extend", lambda self, table, start, end, _: real_extend(self, table, start, end, 0)
    )


def _fold_no_block_that_accepted_proposals_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    real_withdraw = CacheManager.withdraw

    def withdraw(self: CacheManager, sequence: Any, num_tokens: int) -> None:
        real_withdraw(self, sequence, num_tokens)
        self.tables[sequence.request_id].tail_is_own = True

    monkeypatch.setattr(CacheManager, "withdraw", withdraw)


def _withdraw_a_token_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    real_withdraw = CacheManager.withdraw
    monkeypatch.setattr(
        CacheManager, "withdraw", lambda self, sequence, num: real_withdraw(self, sequence, max(0, num - 1))
    )


def _name_a_state_by_the_block_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real_insert = States._insert

    def insert(self: States, own: StateTable, fold: Fold, sequence: Any) -> bool:
        if len(sequence.token_ids) // self.block_size > fold.boundary:
            fold = dataclasses.replace(fold, boundary=fold.boundary + 1)
        return real_insert(self, own, fold, sequence)

    monkeypatch.setattr(States, "_insert", insert)


def _keep_the_log_of_a_row_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheManager, "rewind", lambda self, sequence: None)


def _resume_a_fork_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    real_fork = CacheManager.fork

    def fork(self: CacheManager, parent: Any, child: Any, num_tokens: int) -> int:
        resumed = real_fork(self, parent, child, num_tokens)
        if resumed and self.states is not None and resumed < num_tokens:
            child.num_computed_tokens = resumed = resumed + 1
        return resumed

    monkeypatch.setattr(CacheManager, "fork", fork)


def _let_a_state_go_unreferenced(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: States, sequence: Any, blocks: Any, num_tokens: int, points: Any) -> StateTable:
        return StateTable([Fold(num_tokens // self.block_size, block, num_tokens) for block in blocks])

    monkeypatch.setattr(States, "start", start)


def _tell_one_of_the_holders_of_a_moved_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_moves(self: MovingSplit, tables: Any) -> list[Moves]:
        found = []
        for placed, copies in real_take_moves(self, tables):
            first = {block_id: (name, index, block_id) for name, index, block_id in reversed(placed)}
            found.append(Moves(list(first.values()), copies))
        return found

    monkeypatch.setattr(MovingSplit, "take_moves", take_moves)


def _move_blocks_without_their_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        MovingSplit,
        "take_moves",
        lambda self, tables: [Moves(placed, []) for placed, _ in real_take_moves(self, tables)],
    )


def _give_a_kind_memory_that_another_has(monkeypatch: pytest.MonkeyPatch) -> None:
    real_take = MovingSplit._take

    def take(self: MovingSplit, own: int, other: int, count: int, kept: int) -> bool:
        self._unused += 1
        return real_take(self, own, other, count, kept)

    monkeypatch.setattr(MovingSplit, "_take", take)


def _move_blocks_that_the_plan_has_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "can_give_back", lambda self, num_blocks: num_blocks < self.num_blocks)


def _change_the_border_where_too_little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    real_take = MovingSplit._take
    monkeypatch.setattr(
        MovingSplit, "_take", lambda self, own, other, count, kept: real_take(self, own, other, count, 0)
    )


def walk_often() -> None:
    for seed in range(60):
        walk(seed)


@pytest.mark.slow
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
        _fold_a_token_late,
        _fold_in_place_of_a_shared_block,
        _show_a_state_within_its_step,
        _fold_proposed_tokens,
        _fold_no_block_that_accepted_proposals_completed,
        _withdraw_a_token_too_few,
        _name_a_state_by_the_block_behind_it,
        _keep_the_log_of_a_row_that_left,
        _resume_a_fork_inside_a_block,
        _let_a_state_go_unreferenced,
        _tell_one_of_the_holders_of_a_moved_block,
        _move_blocks_without_their_content,
        _give_a_kind_memory_that_another_has,
        _move_blocks_that_the_plan_has_allocated,
        _change_the_border_where_too_little_is_free,
    ],
)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KVCacheError, KeyError)):
        walk_often()
