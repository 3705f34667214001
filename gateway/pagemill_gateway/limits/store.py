"""What the gateway asks whoever counts: one question and two messages, in plain values.

`memory` counts for this gateway, `redis` for all of them together. Kept narrow because who asks and who counts need not
live in one process (`pagemill_gateway.ipc`): `reserve` is a question with an answer, the others are messages that
nobody waits for.
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
    """Room for one request."""

    account: str
    lease: str
    """Names the reservation until it is settled; never used twice."""
    tokens: int
    """Of prompt and expected answer; 0: no model is asked, and no limit of tokens is in the way."""
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


class Store(Protocol):
    async def reserve(self, ask: Ask) -> Answer:
        """All of it or nothing, atomically. Never fails: a store that cannot ask others decides by itself."""
        ...

    def settle(self, lease: str, tokens: int) -> None:
        """The request is over and used `tokens`. Unknown leases, refused ones for example, are nothing to settle."""
        ...

    def adopt(self, ask: Ask) -> None:
        """A store of before, which is gone, reserved this: it counts here until it is settled, whatever the limits."""
        ...

    async def close(self) -> None:
        """Bring out what is still to be told."""
        ...
