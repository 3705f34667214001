"""How far a simulation is, reported at even steps of its traffic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagemill_simulator.events import Events

STEPS = 200


def tell_progress(events: Events, duration_s: float, progress: Callable[[float], None] | None) -> None:
    """Schedule it, whether or not it is asked for: the events, and with them the end, are the same."""
    for step in range(1, STEPS + 1):
        share = step / STEPS
        events.at(duration_s * share, partial(progress or _ignored, share))


def _ignored(share: float) -> None:
    """Progress is not reported."""
