"""One rank that is slow is found and named; unequal parts, single hiccups and short steps are no reason."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagemill_execution.runners.ranks.speeds import (
    WINDOW_S,
    WINDOW_STEPS,
    WINDOWS,
    RankSpeeds,
    RankWork,
)
from pagemill_kernels.ranks.group import ComputedTime

EVEN = [RankWork(1000, 10)] * 3


class Watched:
    """The sums of ranks, and a clock."""

    def __init__(self, works: Sequence[RankWork], ranks_of_node: int = 1) -> None:
        self._now_s = 0.0
        self._sums = [ComputedTime(0.0, 0)] * len(works)
        self.speeds = RankSpeeds(works, ranks_of_node, lambda: self._now_s)

    def windows(self, number: int, *step_ms: float, steps: int = WINDOW_STEPS) -> None:
        """Let each rank take so long in a step, for so many windows."""
        for _ in range(number):
            self._now_s += WINDOW_S
            self._sums = [
                ComputedTime(before.seconds + steps * ms / 1000, before.steps + steps)
                for before, ms in zip(self._sums, step_ms, strict=True)
            ]
            self.speeds.look(self._sums)

    @property
    def slow_rank(self) -> int | None:
        return None if self.speeds.slow is None else self.speeds.slow.rank


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_takes_twice_as_long_is_named_after_some_windows(rank: int) -> None:
    watched = Watched(EVEN)
    step_ms = [10.0, 12.0, 11.0]
    step_ms[rank] = 40.0
    watched.windows(WINDOWS - 1, *step_ms)
    assert watched.slow_rank is None
    watched.windows(1, *step_ms)
    slow = watched.speeds.slow
    assert slow is not None
    assert (slow.rank, slow.node, slow.step_ms) == (rank, rank, 40.0)
    assert 10 <= slow.expected_ms <= 12


def test_of_two_ranks_the_slower_one_is_named_with_its_node() -> None:
    watched = Watched([RankWork(1000, 10)] * 4, ranks_of_node=2)
    watched.windows(WINDOWS, 10, 10, 10, 30)
    assert watched.speeds.slow is not None
    assert (watched.speeds.slow.rank, watched.speeds.slow.node) == (3, 1)
    pair = Watched([RankWork(1000, 10)] * 2)
    pair.windows(WINDOWS, 30, 10)
    assert pair.slow_rank == 0


@pytest.mark.parametrize(
    ("works", "step_ms"),
    [
        ([RankWork(2000, 20), RankWork(1000, 10)], (20, 10)),
        ([RankWork(1100, 20), RankWork(1000, 10)], (20.0, 10)),
        ([RankWork(3000, 10), RankWork(1000, 10)], (30, 10)),
        ([RankWork(2000, 0), RankWork(500, 5)], (20, 5)),
        ([RankWork(1000, 10)] * 2, (19, 10)),
        ([RankWork(1000, 10)] * 2, (0.9, 0.1)),
    ],
    ids=["a bigger part", "more heads, long contexts", "a head", "no attention", "a bit slower", "short steps"],
)
def test_ranks_that_take_as_long_as_their_parts_are_not_slow(
    works: list[RankWork], step_ms: tuple[float, float]
) -> None:
    watched = Watched(works)
    watched.windows(5 * WINDOWS, *step_ms)
    assert watched.slow_rank is None


def test_a_rank_with_a_small_part_is_slow_when_it_takes_as_long_as_a_big_one() -> None:
    watched = Watched([RankWork(3000, 30), RankWork(1000, 10)])
    watched.windows(WINDOWS, 30, 30)
    assert watched.slow_rank == 1


def test_hiccups_of_different_ranks_are_not_one_slow_rank() -> None:
    watched = Watched(EVEN)
    for _ in range(WINDOWS):
        watched.windows(1, 40, 10, 10)
        watched.windows(1, 10, 40, 10)
    for _ in range(WINDOWS):
        watched.windows(WINDOWS - 1, 40, 10, 10)
        watched.windows(1, 10, 10, 10)
    assert watched.slow_rank is None


def test_it_is_over_when_the_rank_is_as_fast_as_the_others_for_some_windows() -> None:
    watched = Watched(EVEN)
    watched.windows(WINDOWS, 10, 40, 10)
    watched.windows(2 * WINDOWS, 10, 17, 10)
    assert watched.slow_rank == 1, "not yet as fast"
    watched.windows(WINDOWS - 1, 10, 11, 10)
    assert watched.slow_rank == 1
    watched.windows(1, 10, 11, 10)
    assert watched.slow_rank is None
    watched.windows(WINDOWS, 10, 10, 40)
    assert watched.slow_rank == 2


def test_few_steps_say_nothing() -> None:
    watched = Watched(EVEN)
    watched.windows(WINDOWS, 10, 40, 10, steps=1)
    assert watched.slow_rank is None
    watched.windows(WINDOWS * WINDOW_STEPS, 10, 40, 10, steps=1)
    assert watched.slow_rank == 1
