"""The share of every limit that each of several gateways applies while Redis is unavailable."""

from __future__ import annotations

from pagemill_gateway.limits.store import Level, ReservationAnswer
from pagemill_protocol.keys.caller import Limits


def share_of(limits: Limits, num_gateways: int) -> Limits:
    """Return the limits divided by the number of gateways, rounded up, so that each is at least 1."""
    return Limits(*(None if each is None else -(-each // num_gateways) for each in limits))


def with_whole_limits(answer: ReservationAnswer, limits: Limits) -> ReservationAnswer:
    """Return the answer with the whole limits for clients; the remaining amounts stay those of this gateway."""
    return answer._replace(
        requests=_whole(answer.requests, limits.requests_per_minute),
        tokens=_whole(answer.tokens, limits.tokens_per_minute),
    )


def _whole(level: Level | None, limit: int | None) -> Level | None:
    return level if level is None or limit is None else level._replace(limit=limit)
