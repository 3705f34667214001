"""Smaller `priority` first, as if each level more had arrived so much later; a level is a lead, never a ban.

So a request of level 1 waits for the requests of level 0 that arrive within `LEVEL_S` after it, and for no others.
"""

from __future__ import annotations

from pagemill_engine.scheduler.request import Request

LEVEL_S = 30


def rank(request: Request) -> tuple[int, ...]:
    return (round(1000 * (request.arrival_s + request.priority * LEVEL_S)), request.arrival, request.choice)
