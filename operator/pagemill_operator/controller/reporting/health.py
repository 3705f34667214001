"""Serves `/livez`, `/readyz`, `/metrics` and `/debug/scaling`. Alive means progress, not only an open port.

An unreachable API server is no reason to restart: a watch that fails to connect makes progress, a silent one does not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from aiohttp import web

from pagemill_operator.controller.reporting.metrics import OperatorMetrics
from pagemill_servers.process.listening import bind

STALLED_WATCH_S = 150.0
"""A silent watch is opened again after 70 s; twice that time means that it was not."""
STALLED_RECONCILE_S = 180.0
"""Requests end within seconds; a reconcile of this age hangs."""
STALLED_LOOP_S = 30.0
LAG_INTERVAL_S = 1.0


class Health:
    def __init__(
        self,
        *,
        stalled_watch_s: Callable[[], float],
        longest_reconcile_s: Callable[[], float],
        unsynced: Callable[[], list[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unsynced` returns the kinds whose first listing has not reached the caches."""
        self._stalled_watch_s = stalled_watch_s
        self._longest_reconcile_s = longest_reconcile_s
        self._unsynced = unsynced
        self._clock = clock
        self._turned_at = clock()
        self.starting = "the operator is starting"
        """What the operator waits for before the watches begin; empty afterwards."""

    async def measure_lag(self, report: Callable[[float], None]) -> None:
        """Report the event loop's lag in seconds, until cancelled."""
        while True:
            await asyncio.sleep(LAG_INTERVAL_S)
            now = self._clock()
            report(max(0.0, now - self._turned_at - LAG_INTERVAL_S))
            self._turned_at = now

    def problems(self) -> list[str]:
        """Return the reasons to restart this process."""
        return list(self._problems())

    def waits(self) -> list[str]:
        """Return what is missing before the operator can work."""
        if self.starting:
            return [self.starting]
        return [f"the first listing of {kind} is not complete" for kind in self._unsynced()]

    def _problems(self) -> Iterator[str]:
        if not self.starting and (age_s := self._stalled_watch_s()) > STALLED_WATCH_S:
            yield f"a watch has received nothing for {age_s:.0f} s"
        if (age_s := self._longest_reconcile_s()) > STALLED_RECONCILE_S:
            yield f"a reconcile hangs for {age_s:.0f} s"
        if (age_s := self._clock() - self._turned_at) > STALLED_LOOP_S:
            yield f"the event loop has not turned for {age_s:.0f} s"


async def serve(
    health: Health, metrics: OperatorMetrics, host: str, port: int, *, decisions: Callable[[str], bytes]
) -> tuple[web.AppRunner, int]:
    """Start the server; return the runner, to be cleaned up, and the port.

    `decisions` returns the autoscaler's records of a key, or of all for an empty key.
    """

    async def livez(_: web.Request) -> web.Response:
        return _answer(health.problems())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(health.problems() + health.waits())

    async def show_metrics(request: web.Request) -> web.Response:
        scrape = metrics.scrape(request.headers.get("Accept", ""))
        return web.Response(body=scrape.body, headers={"Content-Type": scrape.content_type})

    async def show_decisions(request: web.Request) -> web.Response:
        body = decisions(request.query.get("deployment", ""))
        return web.Response(body=body, content_type="application/x-ndjson")

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", show_metrics)])
    app.add_routes([web.get("/debug/scaling", show_decisions)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, bind(host, port, "metrics_port")).start()
    return runner, int(runner.addresses[0][1])


def _answer(problems: list[str]) -> web.Response:
    return web.Response(status=503 if problems else 200, text="\n".join(problems) or "ok")
