"""First come, first served. A preempted sequence keeps its position, so it cannot be overtaken for ever."""

from __future__ import annotations

from pagemill_engine.scheduler.sequence import Sequence


def rank(request: Sequence) -> tuple[int, ...]:
    return (request.arrival, request.choice)
