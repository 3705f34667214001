"""Stores files and batches in the gateways' Redis: records in hashes, contents in strings, leases that expire."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from redis.asyncio import Redis

from pagemill_gateway.batches.store import Kind, Lease, LeaseLost
from pagemill_gateway.config import MAX_REDIS_VALUE_BYTES, RedisConfig
from pagemill_gateway.limits.redis.link import RedisLink, RedisUnavailable, Script
from pagemill_protocol.errors import unavailable

LEASE_MS = 15_000
"""Another gateway can continue the batches of a gateway that died after this time."""
TIMEOUT_MS = 10_000.0
"""Longer than for other calls to Redis, because no live request waits for these."""
WRITE = Script("write_leased")
TRIM = Script("trim_line")


class RedisBatchStore:
    max_content_bytes = MAX_REDIS_VALUE_BYTES
    scratch_directory: str | None = None

    def __init__(self, config: RedisConfig) -> None:
        """Raise `SettingsError` if the settings of Redis are invalid."""
        self._link = RedisLink(msgspec.structs.replace(config, timeout_ms=TIMEOUT_MS))

    async def put(self, kind: Kind, account: str, object_id: str, value: bytes, lease: Lease | None = None) -> None:
        await self._write("HSET", self._key(kind, account), lease, object_id, value)

    async def get(self, kind: Kind, account: str, object_id: str) -> bytes | None:
        value: bytes | None = await self._ask(lambda client: client.hget(self._key(kind, account), object_id))
        return value

    async def all(self, kind: Kind, account: str) -> dict[str, bytes]:
        found = await self._ask(lambda client: client.hgetall(self._key(kind, account)))
        return {object_id.decode(): found[object_id] for object_id in sorted(found)}

    async def remove(self, kind: Kind, account: str, object_id: str) -> bool:
        return bool(await self._ask(lambda client: client.hdel(self._key(kind, account), object_id)))

    async def append(self, file_id: str, data: bytes, lease: Lease | None = None) -> None:
        await self._write("APPEND", self._key("content", file_id), lease, data)

    async def read(self, file_id: str, offset: int, size: int) -> bytes:
        key = self._key("content", file_id)
        found: bytes = await self._ask(lambda client: client.getrange(key, offset, offset + size - 1))
        return found

    async def remove_content(self, file_id: str) -> None:
        await self._ask(lambda client: client.delete(self._key("content", file_id)))

    async def trim(self, file_id: str) -> None:
        """Remove an unfinished last line, which a long result leaves because it is appended in pieces."""
        key = self._key("content", file_id)
        await self._ask(lambda client: client.eval(TRIM.text, 1, key))

    async def lease(self, batch_id: str) -> Lease | None:
        key, owner = self._key("lease", batch_id), secrets.token_hex(8)
        taken = await self._ask(lambda client: client.set(key, owner, nx=True, px=LEASE_MS))
        return RedisLease(self, key, owner) if taken else None

    async def close(self) -> None:
        await self._link.close()

    async def _write(self, command: str, key: str, lease: Lease | None, *arguments: bytes | str) -> None:
        held = lease if isinstance(lease, RedisLease) else None
        keys = [key] if held is None else [key, held.key]
        values = [command, held.owner if held is not None else "", LEASE_MS, *arguments]
        if not await self._ask(lambda client: client.eval(WRITE.text, len(keys), *keys, *values)):
            raise LeaseLost

    async def renewed(self, lease: RedisLease) -> None:
        await self._write("", self._key("lease", ""), lease)

    async def released(self, lease: RedisLease) -> None:
        await self._write("DEL", lease.key, lease)

    async def _ask(self, command: Callable[[Redis], Awaitable[Any] | Any]) -> Any:
        try:
            return await self._link.call_or_probe(command)
        except RedisUnavailable as away:
            raise unavailable(
                "Files and batches lie in Redis, which does not answer. Try again.", code="store_unavailable"
            ) from away

    def _key(self, kind: str, name: str) -> str:
        """Return the key. The script needs all keys in one slot of a Redis cluster, hence the tag in braces."""
        return f"{self._link.prefix}:{{batches}}:{kind}:{name}"


class RedisLease:
    def __init__(self, store: RedisBatchStore, key: str, owner: str) -> None:
        self._store = store
        self.key = key
        self.owner = owner

    async def renew(self) -> None:
        await self._store.renewed(self)

    async def release(self) -> None:
        try:
            await self._store.released(self)
        except LeaseLost:
            return
