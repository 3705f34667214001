"""Records Kubernetes Events of deployments, which `kubectl describe` shows. Repeats are counted on one Event.

The first event of a kind is created at once; repeats within `QUIET_S` are only counted, and the next write shows them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError, Unreachable
from pagemill_operator.backends.kubernetes.kinds import EVENT, LLM_DEPLOYMENT
from pagemill_operator.backends.kubernetes.snapshot import Manifest

logger = logging.getLogger("pagemill.operator.events")

QUIET_S = 60.0
EACH_REPORTED = frozenset({"Scaled", "ScalingAdvised"})
"""Reasons whose every message is an Event of its own: decisions are not repeats of each other."""
MAX_KINDS = 4096
"""Number of kinds of events remembered, over all objects."""
MAX_MESSAGE = 1024


@dataclass
class _Series:
    name: str
    first: str
    written_at: float
    count: int = 1
    """Written and unwritten occurrences."""
    exists: bool = False


class EventRecorder:
    def __init__(
        self,
        client: Client,
        identity: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._identity = identity
        self._clock = clock
        self._now = now
        self._series: OrderedDict[tuple[str, str, str], _Series] = OrderedDict()

    async def record(self, owner: Manifest, type_: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Record an event. A failed write is logged only: an event is not worth a retry."""
        at = (owner["metadata"]["uid"], type_, f"{reason}: {message}" if reason in EACH_REPORTED else reason)
        now = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        series = self._series.get(at)
        if series is None:
            series = self._series[at] = _Series(_event_name(owner, at), now, self._clock())
            while len(self._series) > MAX_KINDS:
                self._series.popitem(last=False)
        else:
            series.count += 1
            if self._clock() < series.written_at + QUIET_S:
                return
            series.written_at = self._clock()
        self._series.move_to_end(at)
        try:
            await self._write(owner, series, type_, reason, message[:MAX_MESSAGE], now)
        except (ApiError, Unreachable) as error:
            logger.info("event %s of %s was not written: %s", reason, owner["metadata"]["name"], error)

    async def _write(self, owner: Manifest, series: _Series, type_: str, reason: str, message: str, now: str) -> None:
        metadata = owner["metadata"]
        if series.exists:
            repeat = {"count": series.count, "lastTimestamp": now, "message": message}
            try:
                await self._client.merge(EVENT, metadata["namespace"], series.name, repeat)
                return
            except ApiError as error:
                if error.status != 404:
                    raise
                # The Event has expired: a new one is created.
                series.name, series.first, series.count = f"{series.name}.{series.count}", now, 1
        await self._client.create(EVENT, self._event(owner, series, type_, reason, message, now))
        series.exists = True

    def _event(self, owner: Manifest, series: _Series, type_: str, reason: str, message: str, now: str) -> Manifest:
        metadata = owner["metadata"]
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": metadata["namespace"], "name": series.name},
            "involvedObject": {
                "apiVersion": LLM_DEPLOYMENT.api_version,
                "kind": LLM_DEPLOYMENT.name,
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "type": type_,
            "reason": reason,
            "message": message,
            "count": series.count,
            "firstTimestamp": series.first,
            "lastTimestamp": now,
            "source": {"component": "pagemill-operator"},
            "reportingComponent": "pagemill-operator",
            "reportingInstance": self._identity,
        }


def _event_name(owner: Manifest, at: tuple[str, str, str]) -> str:
    """Return a name that is unique per process start, so that an earlier operator's Event is left as it is."""
    text = "/".join((*at, str(time.time_ns())))
    return f"{owner['metadata']['name']}.{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
