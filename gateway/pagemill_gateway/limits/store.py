"""The interface of stores, which count the use of limits.

`memory` counts for this gateway, `redis` for all gateways together. The store may be in another process
(`pagemill_gateway.ipc`): `reserve` and `extend` are calls with a reply, the others are notifications. Tokens count in
the minute, day and month in which they are reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from pagemill_servers.keys.caller import Limits

Reason = Literal["requests", "tokens", "concurrency", "budget_day", "budget_month"]
"""The limit that refused a request."""
WINDOW_S = 60
BUCKET_MS = 1000
"""The length of the buckets in which use is counted. A window is the current bucket and all buckets that overlap the
minute before it, so that no minute exceeds its limit, whenever it begins."""
WINDOW_BUCKETS = WINDOW_S * 1000 // BUCKET_MS + 1


class ReservationRequest(NamedTuple):
    """A reservation for one request."""

    account: str
    lease: str
    """The unique name of the reservation."""
    tokens: int
    """The expected tokens of prompt and answer; 0 for a request without a model, to which token limits do not apply."""
    limits: Limits
    sequences: int = 1
    """The sequences that engines run for the request; `concurrency` limits them."""
    least: int = 0
    """The tokens without which nothing can be generated."""
    used: int = 0
    """For `adopt`: the tokens already reported as used, which are not part of `tokens`."""


class ExtensionRequest(NamedTuple):
    """A call for further tokens for a reservation, up to `tokens`."""

    account: str
    lease: str
    used: int
    """The used tokens of the request so far, including its prompt."""
    tokens: int
    limits: Limits


class Level(NamedTuple):
    """The state of one limit per minute."""

    limit: int
    remaining: int
    reset_s: float
    """Time until the whole limit is available again, without further use."""


class Use(NamedTuple):
    """What an account has used of each limit, under the names of `Limits`."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Tokens that are used or reserved, as in the other periods."""
    concurrency: int = 0
    tokens_per_day: int = 0
    tokens_per_month: int = 0


class UseReport(NamedTuple):
    accounts: list[Use]
    """In the order of the question."""
    is_shared: bool = True
    """Whether the use at all gateways that share limits is counted; if not, only that at this one."""


class ReservationAnswer(NamedTuple):
    refused: Reason | None = None
    """The limit that refused; `None` if the request is reserved."""
    retry_after_s: float = 0.0
    requests: Level | None = None
    tokens: Level | None = None
    granted: int = 0
    """The reserved tokens: those of `ReservationRequest`, but at most the smallest token limit."""


def amount_of(ask: ReservationRequest) -> int:
    """Return the tokens to reserve: at most the smallest token limit, or a longer request would never be served."""
    return min([ask.tokens, *token_limits(ask.limits)])


def token_limits(limits: Limits) -> list[int]:
    """Return the token limits that are set."""
    bounds = (limits.tokens_per_minute, limits.tokens_per_day, limits.tokens_per_month)
    return [each for each in bounds if each is not None]


class Store(Protocol):
    async def reserve(self, ask: ReservationRequest) -> ReservationAnswer:
        """Reserve all or nothing, atomically. It never raises: a store that loses Redis decides alone."""
        ...

    async def extend(self, more: ExtensionRequest) -> int:
        """Add tokens to a reservation, and return how many; 0 if a limit is used up or the lease is unknown."""
        ...

    async def use(self, accounts: Sequence[str]) -> UseReport:
        """Return what these accounts have used, which changes nothing. It never raises for a lost Redis."""
        ...

    def settle(self, lease: str, tokens: int) -> None:
        """End a reservation whose request used `tokens`. Unknown leases, such as refused ones, are ignored."""
        ...

    def undo(self, lease: str) -> None:
        """End a reservation that did not grow as if it had never been made: its request does not count either."""
        ...

    async def settled(self) -> None:
        """Return when no later `reserve`, of any process, counts what was settled before; without Redis at once."""
        ...

    def adopt(self, ask: ReservationRequest) -> None:
        """Count a reservation of an earlier store, regardless of the limits, until it is settled."""
        ...

    async def close(self) -> None:
        """Publish what is unpublished, and close the store."""
        ...
