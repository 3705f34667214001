"""Taking leave of engines that drain: as soon as others can take over, promise to send nothing more, and say so.

The engine serves until it hears that from every gateway (`/internal/drained`), so no request falls between an engine
that leaves and one that this gateway does not know yet. An engine that nobody replaces is let go after a few seconds.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from pagemill_gateway.brain.brain import LocalBrain

logger = logging.getLogger("pagemill.gateway.state")

TIMEOUT = aiohttp.ClientTimeout(total=2.0)
NUM_TRIES = 3


class Handovers:
    def __init__(self, session: aiohttp.ClientSession, brain: LocalBrain, timeout_s: float) -> None:
        self._session = session
        self._brain = brain
        self._timeout_s = timeout_s
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def begin(self, endpoint_id: str, control_url: str, headers: dict[str, str]) -> None:
        """Once per endpoint and drain, however often the engine says that it drains."""
        record = self._brain.registry.endpoints.get(endpoint_id)
        if endpoint_id in self._under_way or record is None or record.acknowledged:
            return
        work = self._run(endpoint_id, control_url, headers)
        task = self._under_way[endpoint_id] = asyncio.create_task(work, name=f"handover:{endpoint_id}")
        task.add_done_callback(lambda _: self._under_way.pop(endpoint_id, None))

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, endpoint_id: str, control_url: str, headers: dict[str, str]) -> None:
        await self._brain.news.wait_until(lambda: self._brain.replaceable(endpoint_id), self._timeout_s)
        self._brain.let_go(endpoint_id)
        for _ in range(NUM_TRIES):
            if await self._acknowledge(control_url, headers):
                break
        self._brain.acknowledged(endpoint_id)

    async def _acknowledge(self, control_url: str, headers: dict[str, str]) -> bool:
        """Whether the engine has heard it, or will never want to."""
        try:
            async with self._session.post(
                f"{control_url}/internal/drained", headers=headers, timeout=TIMEOUT, allow_redirects=False
            ) as response:
                return response.status < 500
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.info("%s was not told that it is let go: %s", control_url, type(error).__name__)
            return False
