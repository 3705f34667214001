"""Smallest `priority` first. Each priority level counts as an arrival `LEVEL_S` seconds later, so that no level
starves.

A request of level 1 waits for the requests of level 0 that arrive within `LEVEL_S` after it, and for no others.
"""

from __future__ import annotations

from pagemill_engine.scheduler.sequence import Sequence

LEVEL_S = 30


def rank(request: Sequence) -> tuple[int, ...]:
    return (round(1000 * (request.arrival_s + request.priority * LEVEL_S)), request.arrival, request.choice)
