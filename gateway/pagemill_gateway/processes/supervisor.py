"""Keeps a gateway's processes running: one control process and several workers.

It serves no requests. It has what must outlive the processes: the listening sockets, so that connections are accepted
while a process is replaced, and the private folder. It forwards stop signals. The workers drain, and the control
process stays until the last worker is gone. `processes.serving` has the main functions of the processes, and
`processes.child` their setup.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.control_token import with_control_token
from pagemill_gateway.processes.child import Setup
from pagemill_gateway.processes.child_process import ChildProcess
from pagemill_gateway.processes.sockets import log_listening, open_ports
from pagemill_servers.process.stop_signals import Stop

DRAIN_MARGIN_S = 30.0
"""A worker whose drain takes this much longer than the settings allow is killed."""
END_TIMEOUT_S = 10.0
"""How long the control process has after its last stop signal before it is killed."""


async def supervise(config: GatewayConfig) -> int:
    """Run until SIGTERM or SIGINT. Raises `SettingsError`.

    Return the exit code, which is 1 if a process could not start; that process has logged the reason.
    """
    data_socket, control_socket = open_ports(config)
    stop = Stop()
    with (
        tempfile.TemporaryDirectory(prefix="pagemill-") as folder,
        # The token is created here, so that it stays the same when the control process is replaced.
        with_control_token(config, control_socket) as guarded,
        stop.on_signals(),
    ):
        family = GatewayProcesses(guarded, folder, data_socket.fileno(), control_socket.fileno())
        try:
            if not await family.start(stop):
                return 1
            if family.all_ready:
                log_listening(guarded, data_socket, control_socket)
            await stop.wait(1)
            # Workers close their copies after the drain delay; this one would keep the port open.
            data_socket.close()
            await family.drain(stop)
        finally:
            await family.end()
            data_socket.close()
            control_socket.close()
    return 0


class GatewayProcesses:
    """All processes of one gateway."""

    def __init__(self, config: GatewayConfig, folder: str, data_listener: int, control_listener: int) -> None:
        control = Setup(role="control", name="control", config=config, folder=folder, listener=control_listener)
        self._control = ChildProcess(control, self._on_process_ready)
        self._workers = [
            ChildProcess(
                Setup(role="worker", name=f"worker-{number}", config=config, folder=folder, listener=data_listener),
                self._on_process_ready,
            )
            for number in range(config.workers)
        ]
        self._draining = False
        self._longest_drain_s = config.drain_delay_s + config.drain_timeout_s + DRAIN_MARGIN_S
        self._tasks: dict[ChildProcess, asyncio.Task[bool]] = {}

    @property
    def all_ready(self) -> bool:
        return all(each.ready.is_set() for each in self._tasks)

    async def start(self, stop: Stop) -> bool:
        """Start all processes. Return true when all serve or a stop signal arrives, and false if one never served."""
        children = [self._control, *self._workers]
        self._tasks = {each: asyncio.create_task(each.run(), name=each.name) for each in children}
        ready = asyncio.gather(*(each.ready.wait() for each in children))
        stopped = asyncio.create_task(stop.wait(1))
        events: list[asyncio.Future[Any]] = [ready, stopped, *self._tasks.values()]
        try:
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            return ready.done() or stopped.done()
        finally:
            ready.cancel()
            stopped.cancel()
            await asyncio.gather(ready, stopped, return_exceptions=True)

    async def drain(self, stop: Stop) -> None:
        """Let the workers drain, and then stop the control process. A second signal shortens the drain."""
        self._draining = True
        if self._control.ready.is_set():
            self._control.ask_to_stop()
        self._stop_workers()
        hurry = asyncio.create_task(stop.wait(2))
        hurry.add_done_callback(lambda _: None if hurry.cancelled() else self._stop_workers())
        await asyncio.wait([self._tasks[each] for each in self._workers], timeout=self._longest_drain_s)
        hurry.cancel()
        self._control.wanted = False
        self._control.ask_to_stop()
        await asyncio.wait([self._tasks[self._control]], timeout=END_TIMEOUT_S)

    async def end(self) -> None:
        """Kill the remaining processes."""
        for each in self._tasks:
            each.kill()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _stop_workers(self) -> None:
        for each in self._workers:
            each.wanted = False
            each.ask_to_stop()

    def _on_process_ready(self, child: ChildProcess) -> None:
        """Send the stop signal to a control process that was replaced during the drain."""
        if self._draining and child is self._control:
            child.ask_to_stop()
