"""A gateway of one process: its head and its one worker, which call each other."""

from __future__ import annotations

from typing import NamedTuple

from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.control_process import ControlProcess
from pagemill_gateway.worker import Worker


class Gateway(NamedTuple):
    head: ControlProcess
    worker: Worker

    async def close(self) -> None:
        await self.worker.close()
        await self.head.close()


async def open_gateway(config: GatewayConfig) -> Gateway:
    """Raises `SettingsError`."""
    head = ControlProcess(config)
    try:
        worker = Worker(config, head.brain, head.sharing.store, head, head.bundles)
    except BaseException:
        await head.close()
        raise
    head.attach(worker)
    return Gateway(head, worker)
