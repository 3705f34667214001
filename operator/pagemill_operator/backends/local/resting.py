"""Puts engines of this machine to sleep and wakes them, one call at a time for each. Which ones, `standby` decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import aiohttp

from pagemill_operator.backends.engine_calls import Call, call_engine
from pagemill_operator.backends.local.replicas import Replica
from pagemill_operator.backends.standby import Orders

RETRY_S = 10.0
"""After a call that an engine did not follow."""


class Resting:
    def __init__(self, session: aiohttp.ClientSession, on_change: Callable[[], None]) -> None:
        self._session = session
        self._on_change = on_change
        self._calls: dict[str, asyncio.Task[None]] = {}
        """By replica's name."""

    def carry_out(self, orders: Orders, replicas: Iterable[Replica], token: str) -> None:
        for replica in replicas:
            if replica.name in self._calls:
                continue
            if replica.name in orders.wake:
                replica.ordered = "waking"
                self._begin(replica, token, "wake_up")
            elif replica.name in orders.sleep:
                replica.ordered = "asleep"
                self._begin(replica, token, "sleep")

    async def close(self) -> None:
        calls = list(self._calls.values())
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _begin(self, replica: Replica, token: str, call: Call) -> None:
        self._calls[replica.name] = asyncio.create_task(self._run(replica, token, call), name=f"{call}:{replica.name}")

    async def _run(self, replica: Replica, token: str, call: Call) -> None:
        launch, fault = replica.supervisor.launch, ""
        try:
            if launch is not None:
                fault = await call_engine(self._session, launch.control_url, token, call)
            await replica.supervisor.look()
            replica.ordered = None
            if fault:
                replica.supervisor.warn(f"{call} was not followed: {fault}")
                self._on_change()
                await asyncio.sleep(RETRY_S)
        finally:
            replica.ordered = None
            del self._calls[replica.name]
            self._on_change()
