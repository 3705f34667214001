"""PodMonitors: a kind that exists only where Prometheus' operator is installed, maybe later than we are.

kopf looks for kinds once, so these are listed from time to time instead of watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagemill_operator.backends.kubernetes.client import ApiError, Client
from pagemill_operator.backends.kubernetes.kinds import POD_MONITOR
from pagemill_operator.backends.kubernetes.snapshot import MANAGED_BY_LABEL, Manifest
from pagemill_operator.controller.cache import Cache


class PodMonitors:
    def __init__(
        self,
        client: Client,
        cache: Cache,
        namespaces: Sequence[str],
        on_change: Callable[[set[str]], None],
    ) -> None:
        """`namespaces`: empty for all. `on_change` is told the keys that a change concerns."""
        self._client = client
        self._cache = cache
        self._namespaces = namespaces
        self._on_change = on_change
        self.exist = False
        """The cluster knows the kind, and we may read it."""

    async def look(self) -> None:
        """Bring the caches up to date. Raises `ApiError` and `Unreachable`."""
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
