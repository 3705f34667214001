"""A gateway of one process: its control process and its one worker as objects that call each other."""

from __future__ import annotations

from typing import NamedTuple

from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.control_process import ControlProcess
from pagemill_gateway.worker import Worker


class Gateway(NamedTuple):
    control: ControlProcess
    worker: Worker

    async def close(self) -> None:
        await self.worker.close()
        await self.control.close()


async def open_gateway(config: GatewayConfig) -> Gateway:
    """Raises `SettingsError`."""
    control = ControlProcess(config)
    try:
        worker = Worker(config, control.brain, control.sharing.store, control, control.bundles)
    except BaseException:
        await control.close()
        raise
    control.attach(worker)
    return Gateway(control, worker)
