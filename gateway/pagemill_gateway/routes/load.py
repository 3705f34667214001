"""`GET /internal/load`: the load of all deployments, a line of JSON on every change, until the reader leaves.

The leading operator reads it from every gateway. Nothing is measured while nobody reads.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from pagemill_gateway.brain.load import DeploymentLoad
from pagemill_gateway.core import Gateway

INTERVAL_S = 0.5
"""Between two looks; changes are told at the next one."""
HEARTBEAT_S = 5.0
"""Without a change, a line goes out at least this often: silence means trouble."""
CONTENT_TYPE = b"application/x-ndjson"
_encoder = msgspec.json.Encoder()


class LoadStream:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        departure = asyncio.create_task(_departure(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", CONTENT_TYPE)]})
            await self._tell(send, departure)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            departure.cancel()

    async def _tell(self, send: Send, departure: asyncio.Task[None]) -> None:
        """Until the reader leaves or the gateway ends."""
        loop = asyncio.get_running_loop()
        told: list[DeploymentLoad] = []
        told_at = -HEARTBEAT_S
        while not departure.done() and not self._gateway.closing.is_set():
            load = self._gateway.brain.load()
            if loop.time() - told_at >= HEARTBEAT_S or not _same(load, told):
                await send({"type": "http.response.body", "body": _line(load), "more_body": True})
                told, told_at = load, loop.time()
            # Somebody who waits where nobody did is told at once: an engine may have to be started for them.
            ending = asyncio.ensure_future(self._gateway.closing.wait())
            waiter = self._gateway.brain.queues.first_waiter()
            events: list[asyncio.Future[Any]] = [departure, ending, waiter]
            await asyncio.wait(events, timeout=INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            waiter.cancel()


def _line(load: list[DeploymentLoad]) -> bytes:
    return _encoder.encode({"deployments": load}) + b"\n"


def _same(load: list[DeploymentLoad], told: list[DeploymentLoad]) -> bool:
    return len(load) == len(told) and all(map(DeploymentLoad.same_but_older, load, told))


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
