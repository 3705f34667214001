"""kopf's part: it lists and watches; each object it reports goes into the caches. Nothing is decided here.

Only `on.event`: kopf writes no annotation, no finalizer, no event, and knows no peers (leadership is a Lease). What
it does not report (bookmarks, complete listings) is seen by `controller.session`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import kopf

from pagemill_kube.kinds import Kind
from pagemill_operator.backends.kubernetes.kinds import POD, WATCHED_KINDS
from pagemill_operator.backends.kubernetes.snapshot import MANAGED_BY_LABEL, NAME_LABEL, Manifest
from pagemill_operator.config import OperatorConfig

Sink = Callable[[Kind, str | None, Manifest], None]
"""Called with kind, type (`ADDED`, `MODIFIED`, `DELETED`, or None from a listing) and object."""

INACTIVITY_TIMEOUT_S = 70.0
"""A watch silent for this long is opened again: API servers send a bookmark every minute."""
REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 5.0
"""kopf gets this long to end its watches."""


def build_registry(sink: Sink, login: Callable[[], kopf.AiohttpSession]) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    async def log_in(**_: Any) -> kopf.AiohttpSession:
        return login()

    kopf.on.login(registry=registry, id="login")(log_in)
    for kind in WATCHED_KINDS:
        _watch(registry, kind, sink)
    return registry


def _watch(registry: kopf.OperatorRegistry, kind: Kind, sink: Sink) -> None:
    async def on_event(event: Mapping[str, Any], **_: Any) -> None:
        sink(kind, event["type"], event["object"])

    kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=f"cache-{kind.plural}")(on_event)


async def watch(
    registry: kopf.OperatorRegistry,
    settings: kopf.OperatorSettings,
    namespaces: Collection[str],
    stop: asyncio.Event,
    on_started: Callable[[], None],
) -> None:
    """Until `stop` is set. Raises what made a watch fail. `namespaces`: empty for the whole cluster.

    Not `kopf.operator`: at its end that cancels every task of the event loop, also those that are not kopf's.
    """
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=settings,
        standalone=True,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
    )
    on_started()
    stopping = asyncio.create_task(stop.wait(), name="stop kopf")
    try:
        await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*tasks, stopping):
            task.cancel()
        done, _ = await asyncio.wait(tasks, timeout=EXIT_TIMEOUT_S)
    for task in done:
        if not task.cancelled() and (error := task.exception()):
            raise error


def build_settings(config: OperatorConfig) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.networking.connect_timeout = CONNECT_TIMEOUT_S
    settings.networking.error_backoffs = Backoffs()
    settings.watching.connect_timeout = CONNECT_TIMEOUT_S
    settings.watching.inactivity_timeout = INACTIVITY_TIMEOUT_S
    settings.watching.reconnect_backoff = 0.5
    settings.watching.chunk_size = 200
    # Each worker holds the last object it saw; it need not linger.
    settings.queueing.idle_timeout = 0.5
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.persistence.progress_storage = _NoProgress()
    for kind in WATCHED_KINDS[1:]:
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = _selector(kind, config)
    return settings


def _selector(kind: Kind, config: OperatorConfig) -> str:
    """What the API server filters by: only our own objects, and the gateways among the pods."""
    if kind == POD:
        return f"{NAME_LABEL} in (pagemill-engine,{config.gateway_selector[NAME_LABEL]})"
    return f"{MANAGED_BY_LABEL}=pagemill-operator"


class Backoffs:
    """Pauses between tries of a request, without end: an API server that is away for an hour is no reason to end.

    None is longer than what is promised about its return.
    """

    first_s = 0.5
    longest_s = 4.0

    def __iter__(self) -> Iterator[float]:
        pause_s = self.first_s
        while True:
            yield pause_s * random.uniform(0.75, 1.0)
            pause_s = min(self.longest_s, pause_s * 2)


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf compares each object with the last one it handled; that is not used here."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        return None


class _NoProgress(kopf.ProgressStorage):
    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: Any) -> Any:
        return essence
