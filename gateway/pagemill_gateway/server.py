"""One gateway process: both ports up, until a signal; then the drain, then down.

The drain: `/readyz` fails first, and every answer asks its client to close the connection; after `drain_delay_s` nobody
can connect any more, while requests on connections that are open are still served; after `drain_timeout_s` those that
are left end with an error event. A second signal skips the waiting.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import orjson
import uvicorn
from starlette.types import ASGIApp

from pagemill_gateway.app import control_app, data_app
from pagemill_gateway.config import GatewayConfig, SettingsError
from pagemill_gateway.core import Gateway
from pagemill_gateway.discovery.catalog import check_catalog
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.http.connection import bounded_protocol

logger = logging.getLogger("pagemill.gateway")
event_logger = logging.getLogger("pagemill.gateway.event")

KEEP_ALIVE_S = 75
CUT_OFF_TIMEOUT_S = 10.0
"""For requests that were cut short to tell their clients."""
QUIET_S = 1.0
"""Without a request, before connections are closed; no longer than the delay, which says that others take over."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(config: GatewayConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises `SettingsError` when it cannot start."""
    try:
        check_catalog(config.catalog)
    except PagemillError as error:
        raise SettingsError(f"catalog: {error.message}") from error
    data_socket = bind(config.host, config.port, "port")
    try:
        control_socket = bind(config.control_host, config.control_port, "control_port")
    except SettingsError:
        data_socket.close()
        raise
    gateway = Gateway(config)
    try:
        await _run(gateway, data_socket, control_socket)
    finally:
        await gateway.close()


async def _run(gateway: Gateway, data_socket: socket.socket, control_socket: socket.socket) -> None:
    stop = Stop()
    with stop.on_signals():
        async with listening(gateway, data_socket, control_socket) as servers:
            _tell("listening", url=url_of(data_socket), control_url=url_of(control_socket))
            stopped = asyncio.create_task(stop.wait(1))
            await asyncio.wait([*servers.tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            await drain(gateway, stop, servers.refuse_connections)


class Listening(NamedTuple):
    tasks: list[asyncio.Task[None]]
    """They end early only when a server fails."""
    refuse_connections: Callable[[], None]
    """On the data port, for good; connections that are open stay."""


@asynccontextmanager
async def listening(
    gateway: Gateway, data_socket: socket.socket, control_socket: socket.socket
) -> AsyncIterator[Listening]:
    """Serve both ports while the block runs."""
    data = _server(data_app(gateway), gateway.config)
    control = _server(control_app(gateway), gateway.config)
    tasks = [
        asyncio.create_task(data.serve(sockets=[data_socket])),
        asyncio.create_task(control.serve(sockets=[control_socket])),
    ]
    try:
        yield Listening(tasks, data.refuse_connections)
    finally:
        gateway.closing.set()
        data.should_exit = control.should_exit = True
        await asyncio.gather(*tasks)


async def drain(gateway: Gateway, stop: Stop, refuse_connections: Callable[[], None] = lambda: None) -> None:
    """Take the gateway out of service without cutting an answer short, if time allows."""
    gateway.draining = True
    _tell("draining", num_requests=gateway.gate.num_inside)
    hurry = asyncio.create_task(stop.wait(2))
    try:
        await asyncio.wait([hurry], timeout=gateway.config.drain_delay_s)
        refuse_connections()
        # Who has just read the end of a stream may send the next request on the same connection.
        quiet_s = min(QUIET_S, gateway.config.drain_delay_s)
        empty = asyncio.create_task(gateway.gate.wait_quiet(quiet_s))
        await asyncio.wait([empty, hurry], timeout=gateway.config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        gateway.gate.close("The gateway is shutting down. Try again.")
        if not empty.done():
            logger.warning("gateway cuts %d requests short", gateway.gate.num_inside)
            gateway.running.end_all()
            await asyncio.wait([empty], timeout=CUT_OFF_TIMEOUT_S)
        empty.cancel()
    finally:
        hurry.cancel()


class Stop:
    """Counts stop signals."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def wait(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._count >= count)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for each in SIGNALS:
            loop.add_signal_handler(each, self._signalled)
        try:
            yield
        finally:
            for each in SIGNALS:
                loop.remove_signal_handler(each)

    def _signalled(self) -> None:
        task = asyncio.ensure_future(self._count_one())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _count_one(self) -> None:
        async with self._changed:
            self._count += 1
            self._changed.notify_all()


class _Server(uvicorn.Server):
    def refuse_connections(self) -> None:
        for server in self.servers:
            server.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the gateway's: uvicorn would stop listening before the drain."""
        yield


def _server(app: ASGIApp, config: GatewayConfig) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=bounded_protocol(config.max_header_bytes),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
        )
    )


def _tell(event: str, **fields: str | int) -> None:
    event_logger.info(orjson.dumps({"event": event, **fields}).decode())


def bind(host: str, port: int, field: str) -> socket.socket:
    """A bound listening socket, so that a port in use is known before anything starts."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise SettingsError(f"{field.replace('port', 'host')}: {host!r} is no address of this machine.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"{field}: cannot listen on {host}:{port}: {error.strerror}. Choose another port, or stop who uses it."
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
