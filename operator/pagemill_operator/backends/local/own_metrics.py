"""Serves the metrics of the deployments on this machine, which an operator exports in a cluster.

Objectives and limits are among them: without this target, rules would silently take their defaults.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from pagemill_protocol.metrics import Scrape

LOOPBACK = "127.0.0.1"


class OwnMetrics:
    def __init__(self, scrape: Callable[[str], Scrape]) -> None:
        """`scrape` returns the metrics in the format that the header Accept requests."""
        self._scrape = scrape
        self._runner: web.AppRunner | None = None
        self.address = ""
        """Host and port; empty before `start`."""

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/metrics", self._show)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, 0).start()
        self.address = f"{LOOPBACK}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _show(self, request: web.Request) -> web.Response:
        scrape = self._scrape(request.headers.get("Accept", ""))
        return web.Response(body=scrape.body, headers={"Content-Type": scrape.content_type})
