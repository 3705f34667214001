"""Which store counts, opened from the settings: this process's memory, or Redis for all gateways together.

Redis's client is imported only where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagemill_gateway.config import RedisConfig
from pagemill_gateway.limits.keys import KeyRing
from pagemill_gateway.limits.memory import MemoryStore
from pagemill_gateway.limits.store import Store
from pagemill_gateway.metrics import GatewayMetrics

if TYPE_CHECKING:
    from pagemill_gateway.limits.redis.shared_keys import SharedKeys
    from pagemill_gateway.limits.redis.store import RedisStore


class Sharing:
    """What this gateway has in common with others."""

    def __init__(self, store: Store, redis: RedisStore | None = None, keys: SharedKeys | None = None) -> None:
        self.store = store
        self._redis = redis
        self._keys = keys

    @property
    def up(self) -> bool | None:
        """Whether Redis answers; `None`: nothing is shared."""
        return self._redis.up if self._redis is not None else None

    async def close(self) -> None:
        if self._keys is not None:
            await self._keys.close()
        await self.store.close()


def open_sharing(config: RedisConfig | None, ring: KeyRing, metrics: GatewayMetrics) -> Sharing:
    """Call inside a running event loop. Redis may be away. Raises `SettingsError`."""
    if config is None:
        return Sharing(MemoryStore())
    from pagemill_gateway.limits.redis.link import Link
    from pagemill_gateway.limits.redis.shared_keys import SharedKeys
    from pagemill_gateway.limits.redis.store import RedisStore

    link = Link(config)
    store = RedisStore(link, num_gateways=config.expected_gateways, on_fallback=metrics.decided_alone)
    store.start()
    keys = SharedKeys(link, ring) if config.keys else None
    if keys is not None:
        keys.start()
    return Sharing(store, store, keys)
