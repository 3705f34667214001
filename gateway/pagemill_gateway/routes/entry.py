"""Lets requests into the gateway: their key's limit of requests first, then a slot, then their body."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from starlette.requests import Request

from pagemill_gateway.limits.in_flight_limit import InFlightSlot
from pagemill_gateway.limits.limiter import Arrival
from pagemill_gateway.routes.access import record_of
from pagemill_gateway.worker import Worker
from pagemill_servers.keys.caller import Caller


class EnteredRequest(NamedTuple):
    """A request inside the gateway."""

    caller: Caller
    slot: InFlightSlot
    arrival: Arrival


def caller_of(worker: Worker, request: Request) -> Caller:
    """Return the caller of a request, and note it in its record. Raises `PagemillError` 401."""
    caller = worker.keys.authenticate(request.scope)
    record_of(request.scope).called_by(caller)
    return caller


@contextmanager
def entered(worker: Worker, caller: Caller, *, is_limited: bool = True) -> Iterator[EnteredRequest]:
    """Hold the request's place for the body of the `with`. Raises `PagemillError` 429 or 503 without one.

    `is_limited`: whether the request counts for the limits of its key.
    """
    if is_limited:
        worker.limiter.check(caller)
    arrival = worker.limiter.arrive(caller)
    try:
        slot = worker.in_flight_limit.take_slot(caller.account)
        try:
            yield EnteredRequest(caller, slot, arrival)
        finally:
            slot.leave()
    finally:
        arrival.over()
