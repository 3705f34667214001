"""Sequences of steps and counted blocks equal the same operations one by one."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_simulator.fleet.engines.fast_kv import KVCounts
from pagemill_simulator.fleet.engines.fast_steps import StepRun, StepTimes

PARAMS = StepTimeParams(
    knots_tokens=[1, 64, 512], knot_ms=[6.0, 8.0, 22.0], decode_context_ms=1e-3, chunk_context_ms=1e-6
)


@settings(deadline=None)
@given(num_rows=st.integers(1, 512), num_context_tokens=st.integers(0, 10**6), num_steps=st.integers(0, 300))
def test_a_sequence_of_steps_ends_when_single_steps_do(num_rows: int, num_context_tokens: int, num_steps: int) -> None:
    model, end_s = StepTimeModel.from_params(PARAMS), 5.0
    for step in range(num_steps):
        end_s += model.predict_ms(num_rows, num_context_tokens + step * num_rows) / 1000
    run = StepTimes(PARAMS, 512).run_of(num_rows, num_context_tokens, 5.0)
    assert run.end_s(num_steps) == pytest.approx(end_s)


@given(
    first_s=st.floats(0.0, 0.1),
    growth_s=st.floats(0.0, 1e-3),
    instant_s=st.floats(-1.0, 50.0),
    most=st.integers(0, 400),
)
def test_steps_before_an_instant_are_counted_like_single_steps(
    first_s: float, growth_s: float, instant_s: float, most: int
) -> None:
    run = StepRun(1.0, first_s, growth_s)
    counted = 0
    while counted < most and run.end_s(counted + 1) < instant_s:
        counted += 1
    assert run.num_ended_before(instant_s, most) == counted


def test_a_step_takes_the_predicted_time() -> None:
    steps, model = StepTimes(PARAMS, 512), StepTimeModel.from_params(PARAMS)
    for step in [(1, 0, 0), (40, 9000, 0), (512, 4000, 300_000)]:
        assert steps.step_s(*step) == pytest.approx(model.predict_ms(*step) / 1000)


@given(
    rows=st.lists(st.integers(1, 200), max_size=12),
    step=st.integers(0, 50),
    num_steps=st.integers(0, 60),
    num_free=st.integers(0, 60),
)
def test_blocks_that_decodes_need_are_counted_like_single_ones(
    rows: list[int], step: int, num_steps: int, num_free: int
) -> None:
    """A row's token needs a new block when the row has filled all its blocks."""
    kv = KVCounts(num_free + 100, 16)
    kv.take(100)
    for num_computed_tokens in rows:
        kv.watch(step, num_computed_tokens)
    needs = [sum((computed + ahead) % 16 == 0 for computed in rows) for ahead in range(num_steps)]
    assert [kv.needed_at(step + ahead) for ahead in range(num_steps)] == needs
    assert kv.needed_by(step, num_steps, len(rows)) == sum(needs)
    fitting = max(count for count in range(num_steps + 1) if sum(needs[:count]) <= num_free)
    assert kv.steps_until_full(step, len(rows), num_steps, kv.num_free) == fitting
    for num_computed_tokens in rows:
        kv.watch(step, num_computed_tokens, -1)
    assert kv.needed_by(step, num_steps, 0) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(0, 15)), max_size=40))
def test_cached_blocks_are_evicted_least_recently_used_first_and_from_their_end(
    turns: list[tuple[int, int, int]],
) -> None:
    """Each operation takes blocks as a row of a session (5 is no session) and frees them."""
    kv, num_blocks = KVCounts(30, 16), 30
    cached: deque[int] = deque()
    """The session of each cached block, with the next one to be evicted first."""
    for session, count, rest in turns:
        num_blocks_held = count + (rest > 0)
        had = cached.count(session) if session != 5 else 0
        hits = min(had, count)
        if hits:
            kv.revive(session, hits)
        kv.take(num_blocks_held - hits)
        left = deque(each for each in cached if each != session or session == 5)
        if hits:
            left.extend([-1] * (had - hits))
        while len(left) > num_blocks - num_blocks_held:
            left.popleft()
        kv.give_back(num_blocks_held, count * 16 + rest, session if session != 5 else None)
        left.extend([session] * count)
        cached = left
        assert kv.num_free == num_blocks
        assert kv.num_cached == len(cached)
        for each in range(5):
            assert kv.num_cached_of(each) == cached.count(each)


def test_without_a_prefix_cache_there_are_no_hits() -> None:
    kv = KVCounts(10, 16, caches=False)
    kv.take(4)
    kv.give_back(4, 64, 3)
    assert (kv.num_free, kv.num_cached, kv.num_cached_of(3)) == (10, 0, 0)
