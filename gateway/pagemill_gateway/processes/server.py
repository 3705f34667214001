"""HTTP servers on bound sockets, the drain, and the gateway of one process, which serves both ports until a signal.

In the drain, `/readyz` fails first, and every response asks its client to close the connection. After `drain_delay_s`
the gateway refuses new connections, and still serves requests on open ones. After `drain_timeout_s` the remaining
requests end with an error event. A second signal skips the waits. `processes` has gateways of several processes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from starlette.types import ASGIApp

from pagemill_gateway.app import control_app, data_app
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.control_process import ControlProcess
from pagemill_gateway.control_token import with_control_token
from pagemill_gateway.logs import log_event
from pagemill_gateway.processes.garbage_collection import reduce_garbage_collection
from pagemill_gateway.processes.sockets import log_listening, open_ports
from pagemill_gateway.routes.websocket.responses import PROTOCOL as WEBSOCKET
from pagemill_gateway.worker import Worker
from pagemill_servers.connection import bounded_protocol
from pagemill_servers.connection_limits import MAX_CONTROL_CONNECTIONS, ConnectionLimits, within_open_files
from pagemill_servers.process.http_server import HttpServer
from pagemill_servers.process.stop_signals import Stop
from pagemill_servers.tls.certificates import ServerTLS
from pagemill_servers.tls.config import TLSConfig

logger = logging.getLogger("pagemill.gateway")

CLOSE_TIMEOUT_S = 5
"""How long connections have at the end to read their last bytes."""
WRITE_TIMEOUT_MARGIN_S = 5.0
"""Added to the time of clients that read nothing, so that a stream's own timeout ends it first."""
FLUSH_TIMEOUT_S = 10.0
"""How long requests that were cut short have to send the error to their clients."""
SECOND_SIGNAL_FLUSH_TIMEOUT_S = 0.3
"""The same time after a second signal."""
IDLE_BEFORE_CLOSE_S = 1.0
"""The time without a request after which connections are closed, at most `drain_delay_s`."""


class Gateway(NamedTuple):
    """A gateway of one process, in which control process and worker are objects that call each other."""

    control: ControlProcess
    worker: Worker

    async def close(self) -> None:
        await self.worker.close()
        await self.control.close()


async def open_gateway(config: GatewayConfig) -> Gateway:
    """Create a gateway of one process. Raises `SettingsError`."""
    control = ControlProcess(config)
    try:
        worker = Worker(config, control.brain, control.sharing.store, control, control.bundles)
    except BaseException:
        await control.close()
        raise
    control.attach(worker)
    return Gateway(control, worker)


async def serve(config: GatewayConfig) -> None:
    """Run a gateway of one process until SIGTERM or SIGINT. Raises `SettingsError`."""
    data_socket, control_socket = open_ports(config)
    with with_control_token(config, control_socket) as guarded:
        gateway = await open_gateway(guarded)
        stop = Stop()
        try:
            with stop.on_signals():
                async with listening(gateway, data_socket, control_socket) as (data, control):
                    reduce_garbage_collection()
                    log_listening(guarded, data_socket, control_socket)
                    await stopped(stop, data, control)
                    gateway.control.draining = True
                    await drain(gateway.worker, stop, data)
        finally:
            await gateway.close()


class Listening(NamedTuple):
    task: asyncio.Task[None]
    """The server's task, which ends early only if the server fails."""
    refuse_connections: Callable[[], None]
    """Stops accepting connections; open ones stay."""
    cut_connections: Callable[[], None]
    """Makes the server close connections at its end without waiting for their last bytes."""
    end: Callable[[], None]
    """Begins the server's end, which leaving `serving` waits for: several servers may end at the same time."""


@asynccontextmanager
async def listening(
    gateway: Gateway, data_socket: socket.socket, control_socket: socket.socket
) -> AsyncIterator[tuple[Listening, Listening]]:
    """Serve both ports while the block runs."""
    config = gateway.control.config
    async with (
        serving_data(gateway.worker, data_socket) as data,
        serving(control_app(gateway.control), control_socket, config) as control,
    ):
        try:
            yield data, control
        finally:
            gateway.control.closing.set()
            data.end()
            control.end()


def serving_data(worker: Worker, listener: socket.socket) -> AbstractAsyncContextManager[Listening]:
    """Return a context manager that serves the data port. Raises `TLSError` for an invalid certificate."""
    config = worker.config
    max_connections = within_open_files(config.bounds_of_one_worker().max_connections)
    limits = ConnectionLimits(max_connections, config.trusted_proxies)
    return serving(data_app(worker), listener, config, config.tls, limits, (WEBSOCKET,))


@asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    config: GatewayConfig,
    tls: TLSConfig | None = None,
    limits: ConnectionLimits | None = None,
    upgrades: Collection[str] = (),
) -> AsyncIterator[Listening]:
    """Serve an app on a port while the block runs, by default the control port's. Raises `TLSError` for an invalid
    certificate. `upgrades`: protocols for which the app may take over connections."""
    limits = limits or ConnectionLimits(MAX_CONTROL_CONNECTIONS)
    async with AsyncExitStack() as stack:
        certificate = await stack.enter_async_context(ServerTLS(tls).followed()) if tls is not None else None
        server = _server(app, config, limits, certificate, upgrades)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield Listening(task, server.refuse_connections, server.cut_connections, server.end)
        finally:
            server.end()
            await task


async def stopped(stop: Stop, *listening: Listening) -> None:
    """Wait until a signal arrives or a server fails."""
    signalled = asyncio.create_task(stop.wait(1))
    await asyncio.wait([signalled, *(each.task for each in listening)], return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()


async def drain(worker: Worker, stop: Stop, data: Listening) -> None:
    """Take the worker out of service. Requests are cut short only after `drain_timeout_s` or a second signal."""
    worker.draining = True
    log_event("draining", num_requests=worker.in_flight_limit.num_in_flight)
    hurry = asyncio.create_task(stop.wait(2))
    try:
        await asyncio.wait([hurry], timeout=worker.config.drain_delay_s)
        data.refuse_connections()
        # A client that has just read the end of a stream may send its next request on the same connection.
        idle_s = min(IDLE_BEFORE_CLOSE_S, worker.config.drain_delay_s)
        empty = asyncio.create_task(worker.in_flight_limit.wait_idle(idle_s))
        await asyncio.wait([empty, hurry], timeout=worker.config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        worker.in_flight_limit.close("The gateway is shutting down. Try again.")
        if not empty.done():
            logger.warning("gateway cuts %d requests short", worker.in_flight_limit.num_in_flight)
            worker.running.cancel_all()
            emptied = asyncio.create_task(worker.in_flight_limit.wait_empty())
            await asyncio.wait([emptied, hurry], timeout=FLUSH_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if hurry.done():
                await asyncio.wait([emptied], timeout=SECOND_SIGNAL_FLUSH_TIMEOUT_S)
            emptied.cancel()
        if hurry.done():
            data.cut_connections()
        empty.cancel()
    finally:
        hurry.cancel()


def _server(
    app: ASGIApp,
    config: GatewayConfig,
    limits: ConnectionLimits,
    certificate: ssl.SSLContext | None,
    upgrades: Collection[str] = (),
) -> HttpServer:
    write_timeout_s = config.slow_client_timeout_s + WRITE_TIMEOUT_MARGIN_S
    protocol = bounded_protocol(
        config.max_header_bytes, upgrades=upgrades, limits=limits, write_timeout_s=write_timeout_s
    )
    idle_s = config.idle_connection_timeout_s
    return HttpServer(app, protocol, limits, certificate, keep_alive_s=idle_s, flush_timeout_s=CLOSE_TIMEOUT_S)
