"""The operator is alive while it makes progress, and ready once its caches are filled."""

from __future__ import annotations

import pytest

from pagemill_operator.controller.reporting.health import STALLED_LOOP_S, STALLED_RECONCILE_S, STALLED_WATCH_S, Health


class World:
    """The state that health checks read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch_s = 0.0
        self.reconcile_s = 0.0
        self.unsynced: list[str] = []
        self.health = Health(
            stalled_watch_s=lambda: self.watch_s,
            longest_reconcile_s=lambda: self.reconcile_s,
            unsynced=lambda: self.unsynced,
            clock=lambda: self.now,
        )
        self.health.starting = ""


@pytest.fixture
def world() -> World:
    return World()


def test_an_operator_that_makes_progress_is_alive(world: World) -> None:
    world.watch_s = STALLED_WATCH_S
    world.reconcile_s = STALLED_RECONCILE_S
    world.now = STALLED_LOOP_S
    assert world.health.problems() == []


def test_a_silent_watch_is_a_problem(world: World) -> None:
    world.watch_s = STALLED_WATCH_S + 1
    assert world.health.problems() == ["a watch has received nothing for 151 s"]


def test_before_the_kind_exists_nothing_is_watched(world: World) -> None:
    world.health.starting = "the definition is not installed"
    world.watch_s = 10_000
    assert world.health.problems() == []
    assert world.health.waits() == ["the definition is not installed"]


def test_a_reconcile_that_hangs_is_a_problem(world: World) -> None:
    world.reconcile_s = STALLED_RECONCILE_S + 1
    assert "hangs" in world.health.problems()[0]


def test_a_blocked_event_loop_is_a_problem(world: World) -> None:
    world.now = STALLED_LOOP_S + 1
    assert "event loop" in world.health.problems()[0]


def test_the_operator_is_ready_once_everything_was_listed(world: World) -> None:
    world.unsynced = ["Pod"]
    assert world.health.waits() == ["the first listing of Pod is not complete"]
    world.unsynced = []
    assert world.health.waits() == []
