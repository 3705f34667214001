"""Keeps one load stream open to each ready gateway pod, and publishes scaling decisions to it. Only the leader does.

Reports go into `load.store`; `status.load` decides how much of them `status` shows, and how often.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from datetime import datetime

import aiohttp

from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.controller.watching.cache import is_ready
from pagemill_operator.load.decisions import DecisionHistory, publishing
from pagemill_operator.load.store import LoadStore
from pagemill_operator.load.stream import STREAM_FAULTS, follow_load
from pagemill_operator.status.load import LEAST_SECONDS_BETWEEN_WRITES
from pagemill_protocol.engine_ports import engine_url
from pagemill_protocol.report.load import LoadFrame

logger = logging.getLogger("pagemill.operator.load")

RETRY_S = 2.0
LOOK_INTERVAL_S = 5.0
"""Seconds between two reconciles of a deployment for its load, which changes all the time."""


def display_wait_s(status: Manifest, now: datetime) -> float:
    """Return the seconds until a changed load is worth a reconcile: `status` keeps what it shows for a while."""
    shown_at = (status.get("load") or {}).get("lastUpdateTime")
    elapsed_s = (now - datetime.fromisoformat(shown_at)).total_seconds() if shown_at else LEAST_SECONDS_BETWEEN_WRITES
    return min(LEAST_SECONDS_BETWEEN_WRITES, max(LOOK_INTERVAL_S, LEAST_SECONDS_BETWEEN_WRITES - elapsed_s))


class LoadStreams:
    def __init__(
        self,
        loads: LoadStore,
        history: DecisionHistory,
        *,
        gateways: Callable[[], list[Manifest]],
        token: Callable[[], str | None],
        port: int,
        on_change: Callable[[set[str]], None],
    ) -> None:
        """`on_change` is called with the keys whose load has changed."""
        self._loads = loads
        self._history = history
        self._gateways = gateways
        self._token = token
        self._port = port
        self._on_change = on_change
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._interrupted: set[str] = set()
        """Gateways whose interruption has been logged."""

    async def run(self) -> None:
        """Keep the streams open until cancelled."""
        # Each stream keeps a connection open.
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            try:
                while True:
                    self._adjust(session)
                    await asyncio.sleep(RETRY_S)
            finally:
                for task in self._streams.values():
                    task.cancel()
                await asyncio.gather(*self._streams.values(), return_exceptions=True)

    def _adjust(self, session: aiohttp.ClientSession) -> None:
        wanted = {
            pod["metadata"]["uid"]: pod for pod in self._gateways() if is_ready(pod) and pod["status"].get("podIP")
        }
        for uid in [uid for uid, task in self._streams.items() if uid not in wanted or task.done()]:
            self._streams.pop(uid).cancel()
            self._loads.remove(uid)
        self._interrupted &= wanted.keys()
        token = self._token()
        for uid in wanted.keys() - self._streams.keys() if token else ():
            url = engine_url(wanted[uid]["status"]["podIP"], self._port)
            self._streams[uid] = asyncio.create_task(self._follow(session, uid, url), name=f"load:{uid}")

    async def _follow(self, session: aiohttp.ClientSession, uid: str, url: str) -> None:
        """Follow one stream until it ends; `_adjust` opens it again."""

        def report(frame: LoadFrame) -> None:
            self._interrupted.discard(uid)
            self._on_change(self._loads.put(uid, frame))

        try:
            token = self._token() or ""
            async with publishing(session, url, token, self._history):
                await follow_load(session, url, token, report)
        except STREAM_FAULTS as error:
            logger.log(
                logging.DEBUG if uid in self._interrupted else logging.WARNING,
                "the load stream of gateway %s is interrupted: %s",
                url,
                str(error) or type(error).__name__,
            )
            self._interrupted.add(uid)
        finally:
            # The report may be outdated: until the next one it counts as missing.
            self._loads.remove(uid)
        await asyncio.sleep(random.uniform(0.5, 1.0))
