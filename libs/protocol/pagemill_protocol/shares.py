"""Limits an amount, such as bytes or places, in all and for each tenant, so that no tenant can deny it to others.

A tenant may take more only while what it has is at most nine times what stays free: alone it gets nine tenths, two get
nearly half each, and something is left for a tenant that comes later, however many there are (dynamic thresholds, as
switches use for shared buffers). Without tenants, as in a gateway that requires no keys, only the limit in all applies.

Pure bookkeeping. Gateways (`limits.in_flight_limit`, `relay.journal`) and engines (`server.request_memory`) use it,
and word the messages of the errors.
"""

from __future__ import annotations

from pagemill_protocol.errors import PagemillError

TIMES_FREE = 9
"""How many times what is free a tenant may have."""
RETRY_S = 1
"""The delay that a refusal for want of room names. Room comes back as requests end."""


def share_exceeded(message: str) -> PagemillError:
    """Return a 429 error about a tenant's own share; `message` states what the tenant holds and the remedy."""
    return PagemillError(
        message, status=429, type="rate_limit_error", code="tenant_share_exceeded", retry_after_s=RETRY_S
    )


class SharedLimit:
    """An amount that tenants share."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._used_by: dict[str, int] = {}
        """What each tenant has; tenants without anything are not in it."""

    def used_by(self, tenant: str) -> int:
        return self._used_by.get(tenant, 0)

    def has_room(self, tenant: str, amount: int) -> bool:
        """Whether `tenant` may take `amount`. An empty name means no tenant, which has no share but the limit."""
        own, free = self._used_by.get(tenant, 0), self.limit - self.used - amount
        # Who has nothing may have one piece of any size: otherwise small limits would admit no request.
        return free >= 0 and (not own or not tenant or own + amount <= TIMES_FREE * free)

    def take(self, tenant: str, amount: int) -> bool:
        """Take `amount` for `tenant`. Return whether there was room; otherwise nothing is taken."""
        own, free = self._used_by.get(tenant, 0), self.limit - self.used - amount
        if free < 0 or (own and tenant and own + amount > TIMES_FREE * free):
            return False
        self.used += amount
        self._used_by[tenant] = own + amount
        return True

    def release(self, tenant: str, amount: int) -> None:
        """Give back `amount`, which `tenant` has."""
        self.used -= amount
        left = self._used_by.get(tenant, 0) - amount
        if left > 0:
            self._used_by[tenant] = left
        else:
            self._used_by.pop(tenant, None)
