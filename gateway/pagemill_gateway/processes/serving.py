"""The main functions of the control process and the workers.

The control process serves the control port and its workers, and ends after them: its first stop signal begins the
drain, and the second one arrives when all workers are gone. A worker reacts to signals like a gateway of one process.
"""

from __future__ import annotations

import asyncio

from pagemill_gateway.app import control_app
from pagemill_gateway.control_process import ControlProcess
from pagemill_gateway.ipc.control_process_client import ControlProcessClient
from pagemill_gateway.ipc.worker_connection import serving_workers
from pagemill_gateway.processes.child import Setup, report_ready
from pagemill_gateway.processes.garbage_collection import reduce_garbage_collection
from pagemill_gateway.processes.server import drain, serving, serving_data, stopped
from pagemill_gateway.worker import Worker
from pagemill_servers.process.stop_signals import Stop


async def serve_control(setup: Setup) -> None:
    """Run the control process. Raises `SettingsError` if it cannot start."""
    control = ControlProcess(
        setup.config, keeps_tokenizers=False, catalog_file=setup.catalog_file, num_before=setup.restarts
    )
    stop = Stop()
    try:
        with stop.on_signals():
            async with (
                serving_workers(control, setup.control_socket),
                serving(control_app(control), setup.listening_socket(), setup.config) as listening,
            ):
                reduce_garbage_collection()
                report_ready()
                await stopped(stop, listening)
                control.draining = True
                await stop.wait(2)
                control.closing.set()
    finally:
        await control.close()


async def serve_data(setup: Setup) -> None:
    """Run a worker. Raises `SettingsError` if it cannot start."""
    line = ControlProcessClient(setup.control_socket)
    worker = Worker(setup.config, line, line, line)
    line.start(worker)
    stop = Stop()
    try:
        with stop.on_signals():
            async with serving_data(worker, setup.listening_socket()) as data:
                reduce_garbage_collection()
                connected = asyncio.create_task(line.wait_connected())
                connected.add_done_callback(lambda _: None if connected.cancelled() else report_ready())
                await stopped(stop, data)
                connected.cancel()
                await drain(worker, stop, data)
    finally:
        await worker.close()
        await line.close()
