"""Opens what gateways share through Redis, according to the settings: the store of limits, API keys, and what is known
of requests that crash engines.

Without Redis a gateway counts in memory. Redis's client is imported only if Redis is configured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pagemill_gateway.config import RedisConfig
from pagemill_gateway.limits.memory import MemoryStore
from pagemill_gateway.limits.store import Store
from pagemill_servers.keys.caller import Caller

if TYPE_CHECKING:
    from pagemill_gateway.limits.redis.link import RedisLink
    from pagemill_gateway.limits.redis.shared_keys import SharedKeys
    from pagemill_gateway.limits.redis.shared_poison import SharedPoison
    from pagemill_gateway.limits.redis.store import RedisStore


class Sharing:
    """The store of limits, the shared keys and the connection to Redis."""

    def __init__(
        self,
        store: Store,
        redis: RedisStore | None = None,
        keys: SharedKeys | None = None,
        link: RedisLink | None = None,
        poison: SharedPoison | None = None,
    ) -> None:
        self.store = store
        self.poison = poison
        """What gateways remember together of requests that crash engines; `None` without Redis."""
        self.link = link
        """The connection to Redis; open until `close`."""
        self._redis = redis
        self._keys = keys

    @property
    def up(self) -> bool | None:
        """Whether Redis is available; `None` if it is not configured."""
        return self._redis.up if self._redis is not None else None

    async def close(self) -> None:
        if self._keys is not None:
            await self._keys.close()
        await self.store.close()


def open_sharing(
    config: RedisConfig | None,
    *,
    on_fallback: Callable[[], None],
    on_keys: Callable[[list[Caller]], None],
) -> Sharing:
    """Open the store and the shared keys inside a running event loop; Redis may be unavailable.

    `on_fallback` is called when a reservation is decided without Redis, and `on_keys` with all keys in Redis after a
    change. Raises `SettingsError`.
    """
    if config is None:
        return Sharing(MemoryStore())
    from pagemill_gateway.limits.redis.link import RedisLink
    from pagemill_gateway.limits.redis.shared_keys import SharedKeys
    from pagemill_gateway.limits.redis.shared_poison import SharedPoison
    from pagemill_gateway.limits.redis.store import RedisStore

    link = RedisLink(config)
    store = RedisStore(link, num_gateways=config.expected_gateways, on_fallback=on_fallback)
    store.start()
    keys = SharedKeys(link, on_keys) if config.keys else None
    if keys is not None:
        keys.start()
    return Sharing(store, store, keys, link, SharedPoison(link))
