"""The store of the settings. Redis's client is imported only where it is used."""

from __future__ import annotations

from pagemill_gateway.batches.directory import DirectoryStore
from pagemill_gateway.batches.store import BatchStore
from pagemill_gateway.config import BatchesConfig, RedisConfig


def open_batch_store(config: BatchesConfig, redis: RedisConfig | None) -> BatchStore:
    """Raises `SettingsError`."""
    if config.directory:
        return DirectoryStore(config.directory)
    from pagemill_gateway.batches.redis import RedisBatchStore

    assert redis is not None  # `GatewayConfig.checked`
    return RedisBatchStore(redis)
