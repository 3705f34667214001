"""Stores responses in Redis for all gateways: one value per response, and an index by age per account."""

from __future__ import annotations

import logging
import time
from typing import Any

from redis.asyncio import Redis

from pagemill_gateway.config import StoredResponsesConfig
from pagemill_gateway.limits.redis.link import RedisLink, RedisUnavailable
from pagemill_protocol.errors import PagemillError, unavailable

logger = logging.getLogger("pagemill.gateway.responses")


class RedisResponses:
    def __init__(self, config: StoredResponsesConfig, link: RedisLink) -> None:
        self._config = config
        self._link = link

    async def keep(self, account: str, response_id: str, value: bytes) -> None:
        index, age_s = self._key(account, ""), int(self._config.max_age_s)

        async def write(client: Redis) -> Any:
            async with client.pipeline(transaction=False) as pipeline:
                pipeline.set(self._key(account, response_id), value, ex=max(1, age_s))
                pipeline.zadd(index, {response_id: time.time()})
                pipeline.expire(index, max(1, age_s))
                pipeline.zcard(index)
                num = (await pipeline.execute())[-1]
            if num > self._config.max_per_tenant:
                oldest: Any = await client.zpopmin(index, num - self._config.max_per_tenant)
                await client.delete(*(self._key(account, each.decode()) for each, _ in oldest))

        try:
            await self._link.call(write)
        except RedisUnavailable:
            logger.warning("Redis does not answer: the response %s is not stored", response_id)

    async def get(self, account: str, response_id: str) -> bytes | None:
        try:
            value: bytes | None = await self._link.call(lambda client: client.get(self._key(account, response_id)))
        except RedisUnavailable as away:
            raise _unavailable() from away
        return value

    async def remove(self, account: str, response_id: str) -> bool:
        try:
            num = await self._link.call(lambda client: client.delete(self._key(account, response_id)))
            await self._link.remove(self._key(account, ""), [response_id])
        except RedisUnavailable as away:
            raise _unavailable() from away
        return bool(num)

    def _key(self, account: str, response_id: str) -> str:
        """Return the key of a response or, without an id, of the account's index.

        The tag in braces puts all keys of an account in one slot of a Redis cluster.
        """
        return f"{self._link.prefix}:{{{account}}}:responses:{response_id}"


def _unavailable() -> PagemillError:
    return unavailable("Stored responses lie in Redis, which does not answer. Try again.", code="store_unavailable")
