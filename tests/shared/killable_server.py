"""HTTP servers of this process that can die as another process would."""

from __future__ import annotations

import asyncio

from aiohttp import web


async def serve(app: web.Application, port: int) -> tuple[web.AppRunner, int]:
    """Serve on `port`, or on a free one for 0; returns which."""
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    return runner, site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]


async def cut_off(runner: web.AppRunner) -> None:
    """As kill -9 looks from outside: every connection resets, nothing listens."""
    for site in runner.sites:
        for listener in site._server.sockets:  # type: ignore[attr-defined]
            asyncio.get_running_loop().remove_reader(listener.fileno())
    for _ in range(3):  # what was accepted last becomes a connection; asyncio drops it unclosed if its server is gone
        await asyncio.sleep(0)
    for connection in list(runner.server.connections):  # type: ignore[union-attr]
        if connection.transport is not None:
            connection.transport.abort()
    await runner.cleanup()
