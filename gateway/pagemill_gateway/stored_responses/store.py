"""Stores responses as bytes, by account and id, in memory; `redis` stores them in Redis.

The control process of a gateway has the only store. `routes.stored` defines the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagemill_gateway.config import StoredResponsesConfig

if TYPE_CHECKING:
    from pagemill_gateway.limits.redis.link import RedisLink


class ResponseStore(Protocol):
    async def keep(self, account: str, response_id: str, value: bytes) -> None:
        """Store a response. It never raises; a failure is logged."""
        ...

    async def get(self, account: str, response_id: str) -> bytes | None:
        """Return a response; `None` if the account has none with this id.

        Raises `PagemillError` 503 while the store is unavailable.
        """
        ...

    async def remove(self, account: str, response_id: str) -> bool:
        """Remove a response; return whether there was one. Raises `PagemillError` 503 like `get`."""
        ...


class _Kept(NamedTuple):
    value: bytes
    expires_at: float


class MemoryResponses:
    def __init__(self, config: StoredResponsesConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._kept: dict[str, dict[str, _Kept]] = {}
        """The responses by account and id, oldest first."""
        self._num_bytes: dict[str, int] = {}
        """The bytes of each account's responses."""

    async def keep(self, account: str, response_id: str, value: bytes) -> None:
        self._drop(account, response_id)
        own = self._kept.setdefault(account, {})
        own[response_id] = _Kept(value, self._clock() + self._config.max_age_s)
        self._num_bytes[account] = self._num_bytes.get(account, 0) + len(value)
        while len(own) > self._config.max_per_tenant:
            self._drop(account, next(iter(own)))
        while sum(self._num_bytes.values()) > self._config.max_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self._drop(largest, next(iter(self._kept[largest])))

    async def get(self, account: str, response_id: str) -> bytes | None:
        kept = self._kept.get(account, {}).get(response_id)
        if kept is not None and kept.expires_at <= self._clock():
            self._drop(account, response_id)
            return None
        return kept.value if kept is not None else None

    async def remove(self, account: str, response_id: str) -> bool:
        there = await self.get(account, response_id) is not None
        self._drop(account, response_id)
        return there

    def _drop(self, account: str, response_id: str) -> None:
        kept = self._kept.get(account, {}).pop(response_id, None)
        if kept is None:
            return
        self._num_bytes[account] -= len(kept.value)
        if not self._kept[account]:
            del self._kept[account], self._num_bytes[account]


class NoResponses:
    """The store of a gateway whose settings turn storing off."""

    async def keep(self, account: str, response_id: str, value: bytes) -> None:
        pass

    async def get(self, account: str, response_id: str) -> bytes | None:
        return None

    async def remove(self, account: str, response_id: str) -> bool:
        return False


def open_responses(config: StoredResponsesConfig | None, link: RedisLink | None) -> ResponseStore:
    """Return the store for the settings. `link` is the connection to Redis, if the gateway has one."""
    if config is None:
        return NoResponses()
    if link is None:
        return MemoryResponses(config)
    from pagemill_gateway.stored_responses.redis import RedisResponses

    return RedisResponses(config, link)
