"""First come, first served: a preempted request keeps its place, so nobody can be overtaken for ever."""

from __future__ import annotations

from pagemill_engine.scheduler.request import Request


def rank(request: Request) -> tuple[int, ...]:
    return (request.arrival, request.choice)
