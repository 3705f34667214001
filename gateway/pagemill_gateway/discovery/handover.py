"""The handover from draining engines: when others can take over, the gateway stops sending requests and confirms it.

The engine serves until every gateway has confirmed (`/internal/drained`), so that no request is lost before the gateway
knows the replacement. Without a replacement the gateway confirms after a timeout.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import aiohttp

from pagemill_routing.brain.observing import Observer

logger = logging.getLogger("pagemill.gateway.state")

TIMEOUT = aiohttp.ClientTimeout(total=2.0)
NUM_TRIES = 3
RETRY_S = 0.3
"""Pause between two attempts, unless a new token arrives first."""
WRONG_TOKEN = frozenset({401, 403})


class DrainAcknowledgements:
    def __init__(
        self, session: aiohttp.ClientSession, observer: Observer, timeout_s: float, gateway: dict[str, str]
    ) -> None:
        """`gateway` has the headers with this gateway's name."""
        self._session = session
        self._gateway = gateway
        self._observer = observer
        self._timeout_s = timeout_s
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def begin(self, endpoint_id: str, control_url: str, token: str) -> None:
        """Begin a handover, unless one is in progress or was confirmed.

        `token` is used if the catalogue has none, because the deployment was removed.
        """
        record = self._observer.registry.endpoints.get(endpoint_id)
        if endpoint_id in self._under_way or record is None or record.drain_acknowledged:
            return
        work = self._run(endpoint_id, control_url, token)
        task = self._under_way[endpoint_id] = asyncio.create_task(work, name=f"handover:{endpoint_id}")
        task.add_done_callback(lambda _: self._under_way.pop(endpoint_id, None))

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, endpoint_id: str, control_url: str, token: str) -> None:
        await self._observer.changes.wait_until(lambda: self._observer.replaceable(endpoint_id), self._timeout_s)
        if not self._observer.leaving(endpoint_id):
            return  # a restarted engine at the same address has reported and accepts requests
        self._observer.drain(endpoint_id)
        for _ in range(NUM_TRIES):
            # The token may have been rotated since the stream was opened.
            token = self._token_now(endpoint_id) or token
            if await self._acknowledge(control_url, token):
                self._observer.drain_acknowledged(endpoint_id)
                return
            await self._observer.changes.wait_until(partial(self._has_rotated, endpoint_id, token), RETRY_S)
            if not self._observer.leaving(endpoint_id):
                return

    def _has_rotated(self, endpoint_id: str, token: str) -> bool:
        return self._token_now(endpoint_id) not in ("", token)

    def _token_now(self, endpoint_id: str) -> str:
        record = self._observer.registry.endpoints.get(endpoint_id)
        return self._observer.registry.token_of(record) if record is not None else ""

    async def _acknowledge(self, control_url: str, token: str) -> bool:
        """Send the confirmation. Return whether the engine received it or will never accept it."""
        headers = {"Authorization": f"Bearer {token}", **self._gateway}
        try:
            async with self._session.post(
                f"{control_url}/internal/drained", headers=headers, timeout=TIMEOUT, allow_redirects=False
            ) as response:
                if response.status in WRONG_TOKEN or response.status >= 500:
                    logger.warning(
                        "%s did not receive the confirmation that it drained: status %d", control_url, response.status
                    )
                    return False
                return True
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.info("%s did not receive the confirmation that it drained: %s", control_url, type(error).__name__)
            return False
