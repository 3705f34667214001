"""Memory that moves between the kinds of a cache: never more than there is, and as many hits as the best division has.

States are as large as the keys and values of 24 blocks. The division that is best for one work is bad for another one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kv_machine import Row

from pagemill_engine.config import EngineConfig
from pagemill_engine.kv.integrity import check_integrity
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.kv.states import States
from pagemill_engine.limits import SchedulerLimits
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.step import StepPlan, StepResult
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.cache_kinds import CacheKind, most_of_first
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

BLOCK = 16
KINDS = (CacheKind("full", block_bytes=1000), CacheKind("state", block_bytes=24_000, state=True))
BUDGET = 960_000
SHARES = (0.15, 0.3, 0.45, 0.6, 0.75)
"""Shares of states in the divisions that are compared."""


class TokenRunner:
    """Samples tokens that depend on nothing but the step."""

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info
        self.num_computed = 0

    def launch(self, plan: StepPlan) -> StepPlan:
        self.num_computed += plan.num_tokens
        return plan

    def wait(self, plan: Any) -> StepResult:
        return StepResult({name: [plan.step % 997] for name in plan.samples})

    def sleep(self) -> int:
        return 0

    def wake(self) -> None: ...

    def close(self) -> None: ...


def a_core(share: float, *, moves: bool) -> tuple[EngineCore, TokenRunner]:
    num_states = int(share * BUDGET) // KINDS[1].block_bytes
    num_blocks = (BUDGET - num_states * KINDS[1].block_bytes) // KINDS[0].block_bytes
    info = RunnerInfo(num_blocks, BLOCK, 12_000, 1000, "weights", "kv", 0, 0, "none")
    info = info._replace(kinds=KINDS, kind_blocks=(num_blocks, num_states), shares_memory=moves)
    runner = TokenRunner(info)
    config = EngineConfig(model="m", block_size=BLOCK, max_num_seqs=6, max_num_batched_tokens=512, overlap=False)
    return EngineCore(config, runner, clock=lambda: 0.0), runner


def words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1000) for _ in range(count)]


def chats(draw: random.Random) -> Iterator[list[int]]:
    """Many conversations, whose turns come in any order, and which end."""
    system = words(draw, 90)
    open_chats: list[list[int]] = []
    while True:
        if len(open_chats) < 14 or draw.random() < 0.1:
            open_chats.append([*system, *words(draw, 40)])
        chat = open_chats[-1 - int(len(open_chats) * draw.random() ** 2)]
        chat += words(draw, draw.randint(20, 120))
        yield chat
        if len(chat) > 1500 or len(open_chats) > 40:
            open_chats.remove(chat)


def one_long_prompt(draw: random.Random) -> Iterator[list[int]]:
    """Questions about one document, which takes most of the memory, between short prompts that share nothing."""
    document = words(draw, 8000)
    while True:
        yield [*document, *words(draw, 30)]
        for _ in range(6):
            yield words(draw, 60)


def agents(draw: random.Random) -> Iterator[list[int]]:
    """A long beginning with tools, and some agents of which each adds a result to its own text in every turn."""
    tools = words(draw, 1600)
    running = [[*tools, *words(draw, 100)] for _ in range(5)]
    while True:
        place = draw.randrange(len(running))
        running[place] = [*running[place], *words(draw, draw.randint(30, 200))]
        yield running[place]
        if len(running[place]) > 3600:
            running[place] = [*tools, *words(draw, 100)]


def document(draw: random.Random) -> Iterator[list[int]]:
    """Questions about a document of two thirds of the memory, with three turns of chats between them."""
    text, others = words(draw, 10_240), chats(draw)
    while True:
        yield [*text, *words(draw, 30)]
        for _ in range(3):
            yield next(others)


WORKS = {"chats": (chats,), "one long prompt": (one_long_prompt,), "agents": (agents,), "document": (document,)}
WORKS |= {"all three": (chats, one_long_prompt, agents)}


def hit_rate(share: float, works: str, num_steps: int, *, moves: bool) -> float:
    """Return the share of prompt tokens that were not computed in so many steps. `share`: of states in the memory."""
    core, runner = a_core(share, moves=moves)
    sources = [work(random.Random(1)) for work in WORKS[works]]
    num_prompt = num_outputs = 0
    kv = core.scheduler.kv
    for step in range(num_steps):
        while core.scheduler.num_running + core.scheduler.num_waiting < 4:
            prompt = next(sources[step * len(sources) // num_steps])
            params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
            name = f"r{num_prompt}"
            try:
                core.add(GenerateRequest(request_id=name, model="m", prompt_token_ids=prompt, sampling=params))
            except PagemillError:  # larger than the first kind ever is
                return 0.0
            num_prompt += len(prompt)
        num_outputs += sum(len(output.token_ids) for output in core.step().outputs)
        assert sum(each.num_blocks * each.kind.block_bytes for each in kv.usage()) <= kv.split.num_bytes <= BUDGET
        if step % 100 == 0:
            check_integrity(kv)
    return (num_prompt + num_outputs - runner.num_computed) / num_prompt


def compare(works: str, num_steps: int) -> None:
    moving = [hit_rate(share, works, num_steps, moves=True) for share in (SHARES[0], SHARES[-1])]
    best = max(hit_rate(share, works, num_steps, moves=False) for share in SHARES)
    assert min(moving) >= 0.95 * best > 0.2


@pytest.mark.slow_for("agents", "document")
@pytest.mark.parametrize("works", WORKS)
def test_as_much_is_hit_as_with_the_best_fixed_division(works: str) -> None:
    compare(works, 250)


def test_a_document_is_hit_less_where_each_state_is_worth_what_its_age_says(monkeypatch: pytest.MonkeyPatch) -> None:
    by_worth = hit_rate(SHARES[0], "document", 500, moves=True)
    monkeypatch.setattr(States, "_worth", lambda self, num_blocks: BLOCK / KINDS[0].block_bytes)
    assert hit_rate(SHARES[0], "document", 500, moves=True) < 0.9 * by_worth


@pytest.mark.full
@pytest.mark.parametrize("works", WORKS)
def test_as_much_is_hit_over_ten_thousand_steps(works: str) -> None:
    compare(works, 10_000)


FULL, WINDOW = CacheKind("full", block_bytes=3), CacheKind("window-4", 4, block_bytes=5)


def compute(kv: CacheManager, row: Row) -> None:
    """Let a row that has started compute all its tokens, a block in a step."""
    while num_tokens := min(4, len(row.token_ids) - row.num_computed_tokens):
        assert kv.allocate(row, num_tokens) is not None
        kv.launch([row.request_id])
        kv.commit(row, num_tokens)
        check_integrity(kv)


def begin(kv: CacheManager, name: str, token_ids: list[int]) -> Row:
    row = Row(name, token_ids)
    kv.start(row, kv.match(row))
    compute(kv, row)
    return row


def test_a_kind_gets_what_the_other_has_not_used_for_longest() -> None:
    kv = CacheManager([9, 9], 4, kinds=[FULL, WINDOW], shares_memory=True)
    for number in range(2):
        kv.free(begin(kv, f"r{number}", [number] * 16))
    sizes = [each.num_blocks for each in kv.usage()]
    begin(kv, "r2", [7] * 40)
    full, window = kv.usage()
    assert full.num_blocks > sizes[0], "it needs ten full blocks, and two of its window"
    assert full.num_evictable >= 7, "what windows have passed was given first"
    assert kv.match(Row("again", [*[0] * 16, 1])).num_tokens < 16, "the oldest request lost blocks first"
    assert kv.match(Row("again", [*[1] * 16, 1])).num_tokens == 16
    assert window.num_blocks < 9


def test_what_cannot_be_had_changes_nothing() -> None:
    kv = CacheManager([9, 9], 4, kinds=[FULL, WINDOW], shares_memory=True)
    held = begin(kv, "held", [1] * 40)
    before = kv.usage()
    row = Row("r", [2] * 60)
    kv.start(row, kv.match(row))
    assert kv.allocate(row, 60) is None
    assert kv.usage() == before
    assert not kv.has_room([13, 0], [0, 0], None)
    assert kv.usage() == before
    kv.free(held)
    assert kv.allocate(row, 32) is not None


def test_a_hit_is_not_evicted_to_make_room_for_its_own_request() -> None:
    kv = CacheManager([4, 6], 4, kinds=[FULL, WINDOW], shares_memory=True)
    kv.free(begin(kv, "first", [1] * 8))
    kv.free(begin(kv, "other", [2] * 8))
    row = Row("again", [*[1] * 8, *[3] * 12])
    match = kv.match(row)
    assert match.num_tokens == 8
    assert kv.has_room(kv.needs_to_start(row, match, 20), [0, 0], None)
    kv.start(row, match)
    assert all(block.block_hash is not None for blocks in match.blocks for block in blocks)
    compute(kv, row)


def test_a_request_may_be_as_long_as_all_memory_allows() -> None:
    limits = SchedulerLimits(
        num_blocks=9, block_size=4, max_model_len=999, vocab_size=9, kinds=(FULL, WINDOW), kind_blocks=(9, 9),
        max_num_batched_tokens=8, shares_memory=True,
    )  # fmt: skip
    assert most_of_first(limits.kinds, limits.blocks_of_kinds, 8, 4) == (72 - 4 * 5) // 3
    assert limits.max_total_tokens == 4 * 17 + 1
    kv = CacheManager([9, 9], 4, kinds=[FULL, WINDOW], max_step_tokens=8, shares_memory=True)
    row = Row("r", list(range(68)))
    kv.start(row, kv.match(row))
    compute(kv, row)


@pytest.mark.parametrize("kind", [WINDOW, CacheKind("state", state=True)], ids=["window", "state"])
def test_a_cache_without_a_kind_that_keeps_all_limits_no_request(kind: CacheKind) -> None:
    limits = SchedulerLimits(
        num_blocks=9, block_size=4, max_model_len=999, vocab_size=9, kinds=(kind,), max_num_batched_tokens=8
    )
    assert limits.max_total_tokens == 999
    narrow = replace(limits, kinds=(CacheKind("wide", 99),))
    assert narrow.max_total_tokens == 9 * 4 + 1, "not even one window fits"


def test_a_state_is_worth_nothing_once_the_keys_and_values_before_it_are_evicted() -> None:
    kv = CacheManager([9, 3], 4, kinds=[FULL, CacheKind("state", state=True, block_bytes=5)])
    for number in range(3):
        kv.free(begin(kv, f"r{number}", [number] * (8 if number else 16)))
    states = kv.caches[-1]
    (dear,) = [block for block in states.pool.blocks if block.worth == 4 * 4 / 5]
    assert [block.worth for block in states.pool.free_list] == [8 / 5, 8 / 5, 16 / 5], "the longest stays longest"
    begin(kv, "other", [7] * 8)
    assert dear.block_hash is not None
    assert dear.rank == 0, "two blocks of the first were taken, the last one first"


def test_content_that_was_computed_twice_stays_cached_when_the_first_copy_is_evicted() -> None:
    kv = CacheManager([9, 9], 4, kinds=[FULL, CacheKind("state", state=True, block_bytes=5)])
    kv.free(begin(kv, "first", [1] * 16))
    again = begin(kv, "again", [*[1] * 8, 2])  # there is no state behind eight tokens
    full = kv.caches[0]
    assert [block.block_hash for block in kv.tables["again"].of_kinds[0].blocks] == [None] * 3
    full.pool.allocate(full.pool.num_free)
    kv.free(again)
    assert len(full.prefixes) == 2
