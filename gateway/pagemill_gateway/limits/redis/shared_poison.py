"""Shares blamed requests between gateways: a sorted set of contents and weights by the time of their end."""

from __future__ import annotations

import logging
import time
from typing import Any

from redis.asyncio import Redis

from pagemill_gateway.limits.redis.link import RedisLink, RedisUnavailable
from pagemill_routing.brain.resilience.poison_memory import KEPT_S, MAX_KEPT, Poison

logger = logging.getLogger("pagemill.gateway.limits")


class SharedPoison:
    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._key = f"{link.prefix}:poison"

    async def add(self, poison: Poison, until: float) -> None:
        async def write(client: Redis) -> Any:
            async with client.pipeline(transaction=False) as pipeline:
                pipeline.zremrangebyscore(self._key, "-inf", time.time())
                pipeline.zadd(self._key, {f"{poison.content.hex()}:{poison.weights_digest}": until})
                pipeline.zremrangebyrank(self._key, 0, -MAX_KEPT - 1)
                pipeline.expire(self._key, int(2 * KEPT_S))
                return await pipeline.execute()

        try:
            await self._link.call(write)
        except RedisUnavailable:
            logger.warning("Redis does not answer: other gateways may try a request that crashes engines")

    async def read(self) -> dict[Poison, float]:
        """Return what all gateways remember; nothing while Redis is unavailable."""
        try:
            found = await self._link.call(
                lambda client: client.zrangebyscore(self._key, time.time(), "+inf", withscores=True)
            )
        except RedisUnavailable:
            return {}
        known: dict[Poison, float] = {}
        for member, until in found:
            content, _, weights_digest = member.decode("utf-8", "replace").partition(":")
            try:
                known[Poison(bytes.fromhex(content), weights_digest)] = until
            except ValueError:
                logger.warning("another program writes to `%s` in Redis", self._key)
        return known
