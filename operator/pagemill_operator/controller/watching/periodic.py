"""The leader's periodic tasks: how they are retried, and the refresh of PodMonitors, which is one of them.

`leader` runs them; the other task is the rotation of `keys`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError, NotLeading, Unreachable
from pagemill_operator.backends.kubernetes.kinds import POD_MONITOR
from pagemill_operator.backends.kubernetes.snapshot import MANAGED_BY_LABEL, Manifest
from pagemill_operator.controller.watching.cache import ObjectCache

logger = logging.getLogger("pagemill.operator")

Task = Callable[[], Awaitable[float]]
"""Returns the seconds until it is due again. May raise `ApiError`, `Unreachable` and `NotLeading`."""


async def retry(name: str, task: Task, retry_s: float) -> float:
    """Run the task until it succeeds; return the seconds until it is due again."""
    while True:
        try:
            return await task()
        except (ApiError, Unreachable, NotLeading) as error:
            logger.warning("%s: %s", name, str(error) or type(error).__name__)
        await asyncio.sleep(random.uniform(0.5, 1.0) * retry_s)


async def repeat(name: str, task: Task, retry_s: float, first_s: float, at_once: asyncio.Event | None = None) -> None:
    """Repeat the task, first in `first_s` seconds, and whenever `at_once` is set; the task clears that event."""
    at_once = at_once or asyncio.Event()
    pause_s = first_s
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await at_once.wait()
        pause_s = await retry(name, task, retry_s)


class PodMonitors:
    """The cluster's PodMonitors, a kind that exists only if Prometheus's operator is installed, maybe later than this
    one.

    kopf looks for kinds only once, so PodMonitors are listed periodically instead of watched.
    """

    def __init__(
        self,
        client: Client,
        cache: ObjectCache,
        namespaces: Sequence[str],
        on_change: Callable[[set[str]], None],
    ) -> None:
        """`namespaces`: empty for all. `on_change` is called with the keys that a change concerns."""
        self._client = client
        self._cache = cache
        self._namespaces = namespaces
        self._on_change = on_change
        self.exist = False
        """Whether the cluster has the kind and the operator may read it."""

    async def refresh(self) -> None:
        """Update the caches. Raise `ApiError` or `Unreachable`."""
        try:
            found = await self._list()
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            found = None
        identities = {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in found or ()}
        changed = self._cache.listed(POD_MONITOR.name, "", identities)
        for item in found or ():
            changed |= self._cache.put(POD_MONITOR.name, item)
        if self.exist != (found is not None):
            self.exist = found is not None
            changed = set(self._cache.keys())
        self._on_change(changed)

    async def _list(self) -> list[Manifest]:
        query = {"labelSelector": f"{MANAGED_BY_LABEL}=pagemill-operator"}
        paths = [POD_MONITOR.path(namespace) for namespace in self._namespaces]
        paths = paths or [f"/apis/{POD_MONITOR.group}/{POD_MONITOR.version}/{POD_MONITOR.plural}"]
        return [item for path in paths for item in (await self._client.get(path, query)).get("items", [])]
