"""Reads API keys from Redis twice a second into the gateway's key rings, so that no request waits for Redis.

The hash `PREFIX:keys` has the SHA-256 of each key as a field and the rest of its entry as the value. While Redis is
unavailable, the last known keys stay valid.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pagemill_gateway.limits.redis.link import RedisLink, RedisUnavailable
from pagemill_servers.keys.caller import Caller
from pagemill_servers.keys.entries import EntryError, parse_entry

logger = logging.getLogger("pagemill.gateway.limits")

READ_INTERVAL_S = 0.5
"""A revoked key is refused within a second. The interval grows if reading takes more than `MAX_READ_SHARE` of it."""
MAX_READ_SHARE = 0.02
RETRY_S = 0.25
"""The interval until the first successful read."""


class SharedKeys:
    def __init__(self, link: RedisLink, publish: Callable[[list[Caller]], None]) -> None:
        """`publish` is called with all keys, at first and after every change."""
        self._link = link
        self._publish = publish
        self._known: dict[bytes, bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._read_for_ever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def read(self) -> None:
        try:
            entries = await self._link.hash_of(f"{self._link.prefix}:keys")
        except RedisUnavailable:
            return
        if entries != self._known:
            self._known = entries
            self._publish(_callers(entries))

    async def _read_for_ever(self) -> None:
        while True:
            began_s = time.monotonic()
            await self.read()
            pause_s = max(READ_INTERVAL_S, (time.monotonic() - began_s) / MAX_READ_SHARE)
            await asyncio.sleep(RETRY_S if self._known is None else pause_s)


def _callers(entries: dict[bytes, bytes]) -> list[Caller]:
    callers: list[Caller] = []
    faults: list[str] = []
    for name, value in entries.items():
        try:
            callers.append(parse_entry(f"{name.decode('utf-8', 'replace')} {value.decode('utf-8', 'replace')}"))
        except EntryError as error:
            faults.append(str(error))
    if faults:
        # Fields are not logged: one that is not a hash may be a key in plain text.
        logger.warning("%d of the keys in Redis are ignored; one of them %s", len(faults), faults[0])
    return callers
