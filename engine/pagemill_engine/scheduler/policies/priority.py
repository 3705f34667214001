"""Smaller `priority` first, then first come: low priorities wait as long as higher ones keep coming."""

from __future__ import annotations

from pagemill_engine.scheduler.request import Request


def waiting_key(request: Request) -> tuple[int, ...]:
    return (request.priority, request.arrival, request.choice)
