"""Gateways for tests: in one process, or with control process and worker connected only by a socket."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.control_process import ControlProcess
from pagemill_gateway.ipc.control_process_client import ControlProcessClient
from pagemill_gateway.ipc.worker_connection import serving_workers
from pagemill_gateway.processes.server import Gateway, open_gateway
from pagemill_gateway.worker import Worker


@asynccontextmanager
async def one_process(config: GatewayConfig) -> AsyncIterator[Gateway]:
    gateway = await open_gateway(config)
    try:
        yield gateway
    finally:
        await gateway.close()


@asynccontextmanager
async def apart(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """Run a control process and a worker in this process that share nothing but a socket."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "control.sock")
        control = ControlProcess(config, keeps_tokenizers=False)
        line = ControlProcessClient(path)
        worker = Worker(config, line, line, line)
        async with serving_workers(control, path):
            line.start(worker)
            await line.wait_connected()
            try:
                yield Gateway(control, worker)
            finally:
                await worker.close()
                await line.close()
                await control.close()


LAYOUTS = {"one process": one_process, "apart": apart}
