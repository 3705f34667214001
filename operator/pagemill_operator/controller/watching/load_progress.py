"""Reads how far loaders are from the end of their logs while they run, for the condition `ModelLoaded`.

A loader writes JSON lines; the last one with bytes counts. Only a running loader costs requests, one every few seconds.
If the logs may not be read, the condition has no numbers. `reconcile` calls this; the engine's `fetching` writes the
log.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError, Unreachable
from pagemill_operator.backends.kubernetes.kinds import POD
from pagemill_operator.backends.kubernetes.observe.pods import loader_run, runs_loader
from pagemill_operator.backends.kubernetes.render.names import LOADER
from pagemill_operator.backends.kubernetes.snapshot import Manifest

logger = logging.getLogger("pagemill.operator.progress")

PERIOD_S = 5.0
"""Seconds between two reads of one deployment's loader log."""
TIMEOUT_S = 3.0
QUERY = {"container": LOADER, "tailLines": "20", "limitBytes": "8192"}


class _Run(NamedTuple):
    """One run of one loader."""

    pod: str
    run: int
    first_bytes: int | None = None
    """The bytes in the volume when it began, once known."""


class LoaderProgress:
    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._texts: dict[str, str] = {}
        self._runs: dict[str, _Run] = {}
        self._looked_at: dict[str, float] = {}

    def text(self, key: str) -> str:
        """Return the progress, such as `1.2 of 4.0 GiB`, or "" if no loader runs or its progress is unknown.

        A loader that was started again has none until more bytes arrive than earlier runs have left.
        """
        return self._texts.get(key, "")

    def forget(self, key: str) -> None:
        self._texts.pop(key, None)
        self._runs.pop(key, None)
        self._looked_at.pop(key, None)

    async def look(self, key: str, pods: Sequence[Manifest]) -> None:
        """Read the progress of the deployment's first running loader, if the last read is long enough ago."""
        pod = next(filter(runs_loader, pods), None)
        if pod is None:
            return self.forget(key)
        before, now = self._runs.get(key), self._clock()
        name, run = str(pod["metadata"]["name"]), loader_run(pod) or 0
        if before is None or before[:2] != (name, run):
            self.forget(key)
            before = self._runs[key] = _Run(name, run)
        if now - self._looked_at.get(key, -1e9) < PERIOD_S:
            return
        self._looked_at[key] = now
        path = POD.path(pod["metadata"]["namespace"], pod["metadata"]["name"], "log")
        try:
            log = await self._client.read(path, query=QUERY, timeout_s=TIMEOUT_S)
        except (ApiError, Unreachable) as error:
            logger.debug("%s: the loader's log cannot be read: %s", key, error)
            return
        counts = list(_counts(log))
        if not counts:
            return
        first = counts[0][0] if before.first_bytes is None else before.first_bytes
        self._runs[key] = before._replace(first_bytes=first)
        done, total = counts[-1]
        if run == 0 or done > first:
            self._texts[key] = _text(done, total)


def _text(done: int, total: int) -> str:
    unit, name = (1024**3, "GiB") if total >= 1024**3 else (1024**2, "MiB")
    return f"{done / unit:.1f} of {total / unit:.1f} {name}"


def _counts(log: bytes) -> Iterator[tuple[int, int]]:
    """Yield the present and the total number of bytes of each line that has them."""
    for line in log.splitlines():
        try:
            fields: Any = json.loads(line)
            done, total = fields.get("done_bytes"), fields.get("total_bytes")
        except (ValueError, AttributeError):
            continue
        if isinstance(done, int) and isinstance(total, int) and 0 <= done <= total:
            yield done, total
