"""What the gateway asks whoever counts: two questions and two messages, in plain values.

`memory` counts for this gateway, `redis` for all of them together. Kept narrow because who asks and who counts need not
live in one process (`pagemill_gateway.ipc`): `reserve` and `extend` are questions with an answer, the others are
messages without one. Tokens count in the minute, day and month in which they are reserved.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from pagemill_protocol.keys.caller import Limits

Reason = Literal["requests", "tokens", "concurrency", "budget_day", "budget_month"]
"""Which limit refused."""
WINDOW_S = 60
BUCKET_MS = 1000
"""Use is counted in buckets of this length; a window is the current bucket and all that touch the minute before it, so
no minute ever holds more than its limit, wherever it begins."""
WINDOW_BUCKETS = WINDOW_S * 1000 // BUCKET_MS + 1


class Ask(NamedTuple):
    """A reservation for one request."""

    account: str
    lease: str
    """Names the reservation until it is settled; never used twice."""
    tokens: int
    """Of prompt and answer, as far as they are expected; 0: no model is asked, and no limit of tokens applies."""
    limits: Limits
    sequences: int = 1
    """Sequences that engines run side by side for it: what `concurrency` counts."""
    least: int = 0
    """With fewer tokens than these nothing can be generated."""
    used: int = 0
    """Of a reservation that is adopted: tokens reported as used before, which are not among `tokens`."""


class More(NamedTuple):
    """Further tokens for a reservation, as many as are left."""

    account: str
    lease: str
    used: int
    """Tokens of the request so far, its prompt included."""
    tokens: int
    limits: Limits


class Level(NamedTuple):
    """How far one limit of the minute is used up."""

    limit: int
    remaining: int
    reset_s: float
    """Until all of it is there again, if nothing more is used."""


class Answer(NamedTuple):
    refused: Reason | None = None
    """`None`: reserved, until `settle`."""
    retry_after_s: float = 0.0
    requests: Level | None = None
    tokens: Level | None = None
    granted: int = 0
    """Tokens that were reserved: what was asked for, but never more than a limit."""


def amount_of(ask: Ask) -> int:
    """What a reservation takes. A request that may need more than a limit takes all of it, or it were never served."""
    return min([ask.tokens, *token_limits(ask.limits)])


def token_limits(limits: Limits) -> list[int]:
    """Those of tokens that are set."""
    bounds = (limits.tokens_per_minute, limits.tokens_per_day, limits.tokens_per_month)
    return [each for each in bounds if each is not None]


class Store(Protocol):
    async def reserve(self, ask: Ask) -> Answer:
        """All of it or nothing, atomically. Never fails: a store that cannot ask others decides by itself."""
        ...

    async def extend(self, more: More) -> int:
        """Tokens added to the reservation; 0 while a limit is used up, and for a lease that is not known."""
        ...

    def settle(self, lease: str, tokens: int) -> None:
        """The request is over and used `tokens`. Unknown leases, refused ones for example, are nothing to settle."""
        ...

    def adopt(self, ask: Ask) -> None:
        """A store of before, which is gone, reserved this: it counts here until it is settled, whatever the limits."""
        ...

    async def close(self) -> None:
        """Publish what is still to be published."""
        ...
