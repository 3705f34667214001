"""The event stream of the page `/ui`: one task asks the control process, and all viewers get the same events.

The task runs while a page is open. A viewer that reads slowly skips states of the fleet, but no samples of the plots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from pagemill_gateway.ports import ControlProcessPort, PlotPoint
from pagemill_gateway.routes.connection import wait_until_disconnected
from pagemill_protocol.errors import PagemillError

logger = logging.getLogger("pagemill.gateway.ui")

INTERVAL_S = 0.5
HEARTBEAT_S = 2.0
"""An event is sent at least this often, because the page takes silence as a fault."""
MAX_VIEWERS = 32
WRITE_TIMEOUT_S = 30.0
HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


class Viewers:
    """The viewers of one worker. Create it inside a running event loop."""

    def __init__(self, control: ControlProcessPort) -> None:
        self._control = control
        self._num_viewers = 0
        self._asking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        """Replaced by a new one after each event."""
        self.fleet = b""
        """The latest state as an event; empty before the first one."""
        self.samples: list[PlotPoint] = []

    @asynccontextmanager
    async def viewing(self) -> AsyncIterator[None]:
        """Count a viewer. Raises `PagemillError` 503 if there are too many."""
        if self._num_viewers >= MAX_VIEWERS:
            raise PagemillError(
                f"{MAX_VIEWERS} pages are open at this gateway process. Close one, or look again later.",
                status=503,
                code="too_many_viewers",
            )
        self._num_viewers += 1
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        try:
            yield
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                self._asking.cancel()
                self._asking, self.fleet, self.samples = None, b"", []

    async def changed(self) -> None:
        """Wait for the next event, but not longer than a heartbeat."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self._changed.wait()

    async def _ask(self) -> None:
        """Ask for the state at each interval; while the control process is away, the page keeps the last one."""
        state = b""
        while True:
            try:
                fleet = await self._control.fleet()
                samples = await self._control.samples(self.samples[-1].number if self.samples else 0)
            except PagemillError as error:
                logger.debug("the page cannot be updated now: %s", error)
            else:
                if fleet != state or samples:
                    state, self.fleet = fleet, event("fleet", fleet)
                    self.samples += samples
                    self._changed.set()
                    self._changed = asyncio.Event()
            await asyncio.sleep(INTERVAL_S)


class EventStream:
    """The answer to one viewer."""

    def __init__(self, viewers: Viewers, may_go_on: Callable[[], bool]) -> None:
        """`may_go_on`: whether the viewer may still look, and the process does not end."""
        self._viewers = viewers
        self._may_go_on = may_go_on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._viewers.viewing():
            departing = asyncio.create_task(wait_until_disconnected(receive))
            try:
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await self._publish(send, departing)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                logger.debug("a viewer does not read")
            finally:
                departing.cancel()

    async def _publish(self, send: Send, departing: asyncio.Task[None]) -> None:
        """Send events until the viewer leaves or may not look any more. Raises `TimeoutError` if it does not read."""
        sent, last = b"", 0
        while not departing.done() and self._may_go_on():
            changed = asyncio.ensure_future(self._viewers.changed())
            fleet = self._viewers.fleet
            body = fleet if fleet is not sent else b": still here\n\n"
            body += b"".join(_sample_event(each) for each in self._viewers.samples if each.number > last)
            sent, last = fleet, self._viewers.samples[-1].number if self._viewers.samples else last
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.wait([departing, changed], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()


def event(name: str, data: bytes) -> bytes:
    """Return a server-sent event; `data` has no line breaks."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


def _sample_event(sample: PlotPoint) -> bytes:
    return event("sample", b'{"unix_s":%.1f,"loads":%s}' % (sample.unix_s, sample.loads))
