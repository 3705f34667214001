"""Connects kopf: it lists and watches, and each object that it reports goes into the caches. Nothing is decided here.

Only `on.event` is used: kopf writes no annotation, finalizer or event, and has no peers (leadership is a Lease).
`controller.watching.session` sees what kopf does not report (bookmarks, complete listings).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import kopf

from pagemill_kube.kinds import Kind
from pagemill_operator.backends.kubernetes.kinds import CHILD_KINDS, POD, WATCHED_KINDS
from pagemill_operator.backends.kubernetes.snapshot import MANAGED_BY_LABEL, NAME_LABEL, Manifest
from pagemill_operator.config import OperatorConfig

Sink = Callable[[Kind, str | None, Manifest], None]
"""Called with kind, type (`ADDED`, `MODIFIED`, `DELETED`, or None from a listing) and object."""

INACTIVITY_TIMEOUT_S = 70.0
"""Seconds of silence after which a watch is opened again: API servers send a bookmark every minute."""
REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 5.0
"""Seconds that kopf has to end its watches."""


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
    """Watch until `stop` is set; raise the error of a watch that failed. `namespaces`: empty for the whole cluster.

    `kopf.operator` is not used, because at its end it cancels every task of the event loop.
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
    # Each worker keeps the last object that it saw, so it should end soon.
    settings.queueing.idle_timeout = 0.5
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.persistence.progress_storage = _NoProgress()
    for kind in (POD, *CHILD_KINDS):
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = _selector(kind, config)
    return settings


def _selector(kind: Kind, config: OperatorConfig) -> str:
    """Return the label selector of a watch: own objects only and, among the pods, the gateways too."""
    if kind == POD:
        return f"{NAME_LABEL} in (pagemill-engine,{config.gateway_selector[NAME_LABEL]})"
    return f"{MANAGED_BY_LABEL}=pagemill-operator"


class Backoffs:
    """An endless sequence of pauses between tries of a request: an API server that is away is no reason to exit.

    The longest pause limits how late the operator notices that the API server is back.
    """

    first_s = 0.5
    longest_s = 4.0

    def __iter__(self) -> Iterator[float]:
        pause_s = self.first_s
        while True:
            yield pause_s * random.uniform(0.75, 1.0)
            pause_s = min(self.longest_s, pause_s * 2)


class _NoDiffs(kopf.DiffBaseStorage):
    """Turns off kopf's comparison of each object with the last one handled."""

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
