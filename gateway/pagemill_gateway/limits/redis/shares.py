"""What one of several gateways lets through while none can ask the others: its share of every limit, rounded up."""

from __future__ import annotations

from pagemill_gateway.limits.store import Answer, Level
from pagemill_protocol.keys.caller import Limits


def share_of(limits: Limits, num_gateways: int) -> Limits:
    """At least 1 of each: a limit must not become a closed door."""
    return Limits(*(None if each is None else -(-each // num_gateways) for each in limits))


def with_whole_limits(answer: Answer, limits: Limits) -> Answer:
    """Clients see the limit they know; what remains is what this gateway can give."""
    return answer._replace(
        requests=_whole(answer.requests, limits.requests_per_minute),
        tokens=_whole(answer.tokens, limits.tokens_per_minute),
    )


def _whole(level: Level | None, limit: int | None) -> Level | None:
    return level if level is None or limit is None else level._replace(limit=limit)
