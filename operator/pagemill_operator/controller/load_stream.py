"""What gateways tell of the load: one endless stream per gateway pod, held by the leader.

Every gateway hears every engine, so their reports of one deployment are views of the same thing: the freshest counts,
sums would count twice. Only their queues are their own and add up. How much of it `status` shows, and how often, is
decided in `status.load`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

import aiohttp
import msgspec

from pagemill_operator.backends.kubernetes.snapshot import Load, Manifest
from pagemill_operator.controller.cache import is_ready
from pagemill_operator.status.load import LEAST_SECONDS_BETWEEN_WRITES

logger = logging.getLogger("pagemill.operator.load")

SILENCE_TIMEOUT_S = 15.0
"""Gateways say something every 5 s."""
CONNECT_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 4 * 2**20
RETRY_S = 2.0
LOOK_INTERVAL_S = 5.0
"""Load changes all the time; a deployment is looked at for it this often at most."""


class DeploymentLoad(msgspec.Struct, frozen=True):
    """One deployment, as one gateway sees it."""

    namespace: str
    name: str
    kv_cache_usage: float | None = None
    running: int = 0
    waiting: int = 0
    ready: int = 0
    age_s: float | None = None
    queued: int = 0
    """Requests that wait in this gateway alone."""
    queued_bytes: int = 0
    queued_oldest_s: float | None = None


class Report(msgspec.Struct, frozen=True):
    deployments: list[DeploymentLoad] = []


class Seen(NamedTuple):
    load: DeploymentLoad
    at_s: float
    """When its engines said so, on our clock."""

    @property
    def counts(self) -> tuple[float | None, int, int, int, int]:
        load = self.load
        return load.kv_cache_usage, load.running, load.waiting, load.ready, load.queued


class LoadBook:
    """The latest report of every gateway."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, dict[str, Seen]] = {}
        """Gateway -> deployment's key -> what it said."""

    def report(self, gateway: str, report: Report) -> set[str]:
        """Keys about which the gateway says something else than before."""
        now, before = self._clock(), self._reports.get(gateway, {})
        self._reports[gateway] = after = {
            f"{load.namespace}/{load.name}": Seen(load, now - (load.age_s or 0.0)) for load in report.deployments
        }
        return {key for key, seen in after.items() if key not in before or before[key].counts != seen.counts}

    def lost(self, gateway: str) -> None:
        self._reports.pop(gateway, None)

    def load(self, key: str) -> Load | None:
        """The freshest view; None while no gateway knows the deployment."""
        views = [report[key] for report in self._reports.values() if key in report]
        if not views:
            return None
        freshest = max(views, key=lambda seen: seen.at_s).load
        usage = freshest.kv_cache_usage
        return Load(
            kv_cache_usage=None if usage is None else min(1.0, max(0.0, usage)),
            running=max(0, freshest.running),
            waiting=max(0, freshest.waiting) + sum(max(0, seen.load.queued) for seen in views),
            ready=max(seen.load.ready for seen in views),
        )


def display_wait_s(status: Manifest, now: datetime) -> float:
    """Seconds until a changed load is worth a look: what `status` shows stays there for a while."""
    shown_at = (status.get("load") or {}).get("lastUpdateTime")
    elapsed_s = (now - datetime.fromisoformat(shown_at)).total_seconds() if shown_at else LEAST_SECONDS_BETWEEN_WRITES
    return min(LEAST_SECONDS_BETWEEN_WRITES, max(LOOK_INTERVAL_S, LEAST_SECONDS_BETWEEN_WRITES - elapsed_s))


class LoadStreams:
    """Keeps one stream open to each ready gateway."""

    def __init__(
        self,
        book: LoadBook,
        *,
        gateways: Callable[[], list[Manifest]],
        token: Callable[[], str | None],
        port: int,
        on_change: Callable[[set[str]], None],
    ) -> None:
        """`on_change` is told the keys whose load has changed."""
        self._book = book
        self._gateways = gateways
        self._token = token
        self._port = port
        self._on_change = on_change
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._unheard: set[str] = set()
        """Gateways whose silence is in the log already."""

    async def run(self) -> None:
        """Until cancelled."""
        async with aiohttp.ClientSession(trust_env=False, read_bufsize=MAX_LINE_BYTES) as session:
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
            self._book.lost(uid)
        self._unheard &= wanted.keys()
        token = self._token()
        for uid in wanted.keys() - self._streams.keys() if token else ():
            address = wanted[uid]["status"]["podIP"]
            host = f"[{address}]" if ":" in address else address
            url = f"http://{host}:{self._port}/internal/load"
            self._streams[uid] = asyncio.create_task(self._follow(session, uid, url), name=f"load:{uid}")

    async def _follow(self, session: aiohttp.ClientSession, uid: str, url: str) -> None:
        """Until the stream ends; it is opened anew by `_adjust`."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self._token()}"}
        try:
            async with session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
                if response.status != 200:
                    raise ValueError(f"the answer is {response.status}")
                async for line in response.content:
                    if line.strip():
                        self._unheard.discard(uid)
                        self._on_change(self._book.report(uid, msgspec.json.decode(line, type=Report)))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            logger.log(
                logging.DEBUG if uid in self._unheard else logging.WARNING,
                "the load of gateway %s is not heard: %s",
                url,
                error or type(error).__name__,
            )
            self._unheard.add(uid)
        await asyncio.sleep(random.uniform(0.5, 1.0))
