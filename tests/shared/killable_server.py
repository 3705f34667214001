"""HTTP servers in this process that can be ended like a killed process."""

from __future__ import annotations

import asyncio

from aiohttp import web


async def serve(app: web.Application, port: int) -> tuple[web.AppRunner, int]:
    """Serve on `port`, or on a free one for 0; return the runner and the port."""
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    return runner, site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]


async def cut_off(runner: web.AppRunner) -> None:
    """End like a process that is killed with SIGKILL: reset every connection and stop listening."""
    for site in runner.sites:
        for listener in site._server.sockets:  # type: ignore[attr-defined]
            asyncio.get_running_loop().remove_reader(listener.fileno())
    # The last accepted socket becomes a connection, which asyncio drops unclosed if its server is gone.
    for _ in range(3):
        await asyncio.sleep(0)
    for connection in list(runner.server.connections):  # type: ignore[union-attr]
        if connection.transport is not None:
            connection.transport.abort()
    await runner.cleanup()
