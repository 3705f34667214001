"""How far loaders are: read from the end of their logs while they run, for the condition `ModelLoaded`.

A loader writes JSON lines; the last with bytes counts. Only a loader that runs costs requests, one every few seconds.
Where the logs may not be read, the condition stands without numbers. Neighbours: `reconcile` asks; the engine's
`loader` writes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError, Unreachable
from pagemill_operator.backends.kubernetes.kinds import POD
from pagemill_operator.backends.kubernetes.observe.pods import runs_loader
from pagemill_operator.backends.kubernetes.render.names import LOADER
from pagemill_operator.backends.kubernetes.snapshot import Manifest

logger = logging.getLogger("pagemill.operator.progress")

PERIOD_S = 5.0
"""Between two looks at the loader of one deployment."""
TIMEOUT_S = 3.0
QUERY = {"container": LOADER, "tailLines": "20", "limitBytes": "8192"}


class LoadProgress:
    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._texts: dict[str, str] = {}
        self._looked_at: dict[str, float] = {}

    def text(self, key: str) -> str:
        """Such as `1.2 of 4.0 GiB`; empty where no loader runs, or nothing is known of it."""
        return self._texts.get(key, "")

    def forget(self, key: str) -> None:
        self._texts.pop(key, None)
        self._looked_at.pop(key, None)

    async def look(self, key: str, pods: Sequence[Manifest]) -> None:
        """Read how far the first running loader of the deployment is, if the last look is long enough ago."""
        pod = next(filter(runs_loader, pods), None)
        if pod is None:
            return self.forget(key)
        now = self._clock()
        if now - self._looked_at.get(key, -1e9) < PERIOD_S:
            return
        self._looked_at[key] = now
        path = POD.path(pod["metadata"]["namespace"], pod["metadata"]["name"], "log")
        try:
            log = await self._client.read(path, query=QUERY, timeout_s=TIMEOUT_S)
        except (ApiError, Unreachable) as error:
            logger.debug("%s: the loader's log cannot be read: %s", key, error)
            return
        if text := progress_text(log):
            self._texts[key] = text


def progress_text(log: bytes) -> str:
    """From the last line that has bytes."""
    for line in reversed(log.splitlines()):
        try:
            fields: Any = json.loads(line)
            done, total = fields.get("done_bytes"), fields.get("total_bytes")
        except (ValueError, AttributeError):
            continue
        if isinstance(done, int) and isinstance(total, int) and 0 <= done <= total:
            unit, name = (1024**3, "GiB") if total >= 1024**3 else (1024**2, "MiB")
            return f"{done / unit:.1f} of {total / unit:.1f} {name}"
    return ""
