"""The phases of an engine's start add up to the whole start."""

from __future__ import annotations

from hand_clock import Clock

from pagemill_engine.loop.process import StartClock


def test_a_phase_ends_where_the_next_begins_and_repeated_phases_are_added() -> None:
    now = Clock(10.0)
    clock = StartClock(now)
    for phase, lasts_s in (
        ("loading", 2.0),
        ("allocating", 1.0),
        ("warming", 4.0),
        ("first_token", 0.5),
        ("warming", 1.0),
    ):
        clock.progress(phase)
        now.now += lasts_s
    assert clock.seconds() == {"load": 3.0, "warm": 5.0, "first_token": 0.5}


def test_unreported_time_counts_as_load() -> None:
    now = Clock()
    clock = StartClock(now)
    now.now += 2
    assert clock.seconds() == {"load": 2.0}
