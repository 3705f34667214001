"""`GET /internal/load`: streams the load of all deployments in frames of `pagemill_protocol.report.load`.

The leading operator reads it from every gateway. Without a reader, the load is not measured.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send

from pagemill_gateway.control_process import ControlProcess
from pagemill_gateway.routes.connection import wait_until_disconnected
from pagemill_protocol.frames import LOAD_CONTENT_TYPE, encode_load
from pagemill_protocol.report.load import DeploymentLoad, LoadFrame
from pagemill_protocol.versions import stream_headers
from pagemill_routing.brain.load.measure import differs_only_in_age

INTERVAL_S = 0.5
"""Interval of measurements; changes are published with the next one."""
HEARTBEAT_S = 2.0
"""A frame is sent at least this often, also without a change, because the reader takes silence as a fault."""


class LoadStream:
    def __init__(self, control: ControlProcess) -> None:
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        departing = asyncio.create_task(wait_until_disconnected(receive))
        headers = stream_headers(LOAD_CONTENT_TYPE)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._publish(send, departing)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            departing.cancel()

    async def _publish(self, send: Send, departing: asyncio.Task[None]) -> None:
        """Send frames until the reader disconnects or the gateway ends."""
        loop = asyncio.get_running_loop()
        published: list[DeploymentLoad] = []
        published_at, sequence = -HEARTBEAT_S, 0
        while not departing.done() and not self._control.closing.is_set():
            load = self._control.brain.reader.load()
            if loop.time() - published_at >= HEARTBEAT_S or not _same(load, published):
                body = encode_load(LoadFrame(sequence=sequence, deployments=load))
                await send({"type": "http.response.body", "body": body, "more_body": True})
                published, published_at, sequence = load, loop.time(), sequence + 1
            # The first waiting request of a deployment is published at once, because an engine may have to be started.
            ending = asyncio.ensure_future(self._control.closing.wait())
            waiter = self._control.brain.reader.queues.first_waiter()
            events: list[asyncio.Future[Any]] = [departing, ending, waiter]
            await asyncio.wait(events, timeout=INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            waiter.cancel()


def _same(load: list[DeploymentLoad], published: list[DeploymentLoad]) -> bool:
    return len(load) == len(published) and all(map(differs_only_in_age, load, published))
