"""Keeps a gateway's processes running: one brain, several workers. It serves nobody itself and holds what must outlive
them: the listening sockets, so that nobody is refused while one of them is replaced, and their private folder.

A stop signal goes to all of them. The workers drain, the brain stays until the last one is gone. What each of them does
is `processes.serving`, what it is given `processes.child`.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.control_token import with_control_token
from pagemill_gateway.processes.child import Setup
from pagemill_gateway.processes.keeper import Keeper
from pagemill_gateway.processes.sockets import open_ports, report_listening
from pagemill_gateway.processes.stop import Stop

DRAIN_MARGIN_S = 30.0
"""A worker that drains for so much longer than the settings allow hangs."""
END_TIMEOUT_S = 10.0
"""After its last stop signal the brain has this long before it is killed."""


async def supervise(config: GatewayConfig) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code: 1 when a process could not start, which has said why.

    Raises `SettingsError`.
    """
    data_socket, control_socket = open_ports(config)
    stop = Stop()
    with (
        tempfile.TemporaryDirectory(prefix="pagemill-") as folder,
        # A brain that takes another one's place asks for the same token.
        with_control_token(config, control_socket) as guarded,
        stop.on_signals(),
    ):
        family = Family(guarded, folder, data_socket.fileno(), control_socket.fileno())
        try:
            if not await family.start(stop):
                return 1
            if family.all_up:
                report_listening(guarded, data_socket, control_socket)
            await stop.wait(1)
            # Workers close theirs when the delay is over; this one must not keep the port open then.
            data_socket.close()
            await family.drain(stop)
        finally:
            await family.end()
            data_socket.close()
            control_socket.close()
    return 0


class Family:
    """All processes of one gateway."""

    def __init__(self, config: GatewayConfig, folder: str, data_listener: int, control_listener: int) -> None:
        brain = Setup(role="brain", name="brain", config=config, folder=folder, listener=control_listener)
        self._brain = Keeper(brain, self._came_up)
        self._workers = [
            Keeper(
                Setup(role="worker", name=f"worker-{number}", config=config, folder=folder, listener=data_listener),
                self._came_up,
            )
            for number in range(config.workers)
        ]
        self._draining = False
        self._longest_drain_s = config.drain_delay_s + config.drain_timeout_s + DRAIN_MARGIN_S
        self._tasks: dict[Keeper, asyncio.Task[bool]] = {}

    @property
    def all_up(self) -> bool:
        return all(each.up.is_set() for each in self._tasks)

    async def start(self, stop: Stop) -> bool:
        """Whether all serve, or are to stop before that. False: one never came up."""
        everybody = [self._brain, *self._workers]
        self._tasks = {each: asyncio.create_task(each.run(), name=each.name) for each in everybody}
        up = asyncio.gather(*(each.up.wait() for each in everybody))
        stopped = asyncio.create_task(stop.wait(1))
        events: list[asyncio.Future[Any]] = [up, stopped, *self._tasks.values()]
        try:
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            return up.done() or stopped.done()
        finally:
            up.cancel()
            stopped.cancel()
            await asyncio.gather(up, stopped, return_exceptions=True)

    async def drain(self, stop: Stop) -> None:
        """Until every worker has served what it had, or a second signal came. The brain goes last."""
        self._draining = True
        if self._brain.up.is_set():
            self._brain.ask_to_stop()
        self._stop_workers()
        hurry = asyncio.create_task(stop.wait(2))
        hurry.add_done_callback(lambda _: None if hurry.cancelled() else self._stop_workers())
        await asyncio.wait([self._tasks[each] for each in self._workers], timeout=self._longest_drain_s)
        hurry.cancel()
        self._brain.wanted = False
        self._brain.ask_to_stop()
        await asyncio.wait([self._tasks[self._brain]], timeout=END_TIMEOUT_S)

    async def end(self) -> None:
        """Whoever is left is killed."""
        for each in self._tasks:
            each.kill()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _stop_workers(self) -> None:
        for each in self._workers:
            each.wanted = False
            each.ask_to_stop()

    def _came_up(self, keeper: Keeper) -> None:
        """A brain that took another one's place does not know yet that the gateway is on its way out."""
        if self._draining and keeper is self._brain:
            keeper.ask_to_stop()
