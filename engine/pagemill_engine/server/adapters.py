"""The LoRA adapters that clients may name: where each comes from, what became of it, and its digest.

They come from the settings, from `adapters_file`, which is read again when it changes, and from the routes
`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`. Each is fetched by a thread, then read by the engine process,
which knows adapters by digest only. A name whose source changes keeps its old content until the new one is known. What
fails concerns that adapter alone, and is tried again while it is wanted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import AdapterRead, AdapterUse
from pagemill_engine.server.adapter_loads import AdapterLoads
from pagemill_engine.server.followed_file import FollowedFile
from pagemill_engine.server.metrics import ServerMetrics
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_models.adapters.errors import AdapterError, refused
from pagemill_models.sources import SourceError, resolve_adapter
from pagemill_protocol.errors import invalid_field, unavailable
from pagemill_protocol.report.adapters import AdapterStatus, WantedAdapter, WantedAdapters

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Pauses before a refused adapter is tried again; each is twice the one before."""
MAX_FETCHES = 4
"""Adapters that are fetched at once."""


@dataclass(slots=True, eq=False)
class _Served:
    wanted: WantedAdapter
    status: AdapterStatus
    since_unix_s: int
    work: asyncio.Task[None] | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it was known or refused for the first time."""


class ServedAdapters:
    def __init__(
        self, config: EngineConfig, names: Sequence[str], publisher: StatePublisher, metrics: ServerMetrics
    ) -> None:
        """`names`: the model's, which no adapter may have."""
        path = config.adapters_file
        self._file = None if path is None else FollowedFile(Path(path), WantedAdapters, self._want)
        self._names = names
        self._max_loras = config.max_loras
        self._publisher, self._metrics = publisher, metrics
        self._loads: AdapterLoads | None = None
        self._served: dict[str, _Served] = {}
        self._from_file: set[str] = set()
        self._conflicts: list[AdapterStatus] = []
        """Entries of the file whose name something else has."""
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._use = AdapterUse()
        self._work: set[asyncio.Task[None]] = set()
        self._asked = config.lora_modules

    # -- what clients ask

    @property
    def names(self) -> list[str]:
        """The names of adapters that are served now."""
        return [name for name, each in self._served.items() if each.status.digest]

    def get(self, name: str) -> tuple[AdapterStatus, int] | None:
        """Return a served adapter and the time since which it is wanted."""
        served = self._served.get(name)
        return None if served is None or not served.status.digest else (served.status, served.since_unix_s)

    def digest_of(self, name: str) -> str | None:
        """Return the digest of the adapter of that name; None: there is no such name. Raises `PagemillError` while it
        cannot be served."""
        served = self._served.get(name)
        if served is None:
            return None
        status = served.status
        if status.digest:
            return status.digest
        if status.state == "fetching":
            raise unavailable(f"The adapter `{name}` is being loaded.", retry_after_s=1, code="adapter_loading")
        raise refused(status.message)

    async def load(self, wanted: WantedAdapter, *, in_place: bool = False) -> None:
        """Serve one more adapter. Raises `PagemillError` if its name is taken or it is refused.

        `in_place`: whether it may replace one of the same name that does not come from the file.
        """
        replaces = in_place and wanted.name in self._served and wanted.name not in self._from_file
        if not replaces and (taken := self._taken(wanted.name)) is not None:
            raise invalid_field("lora_name", f"{taken} Use another name.", code="adapter_name_taken")
        served = self._begin(wanted, retries=False)
        await served.settled.wait()
        if served.status.state == "refused":
            status = served.status
            if self._served.get(wanted.name) is served and not status.digest:
                self._remove(wanted.name)
            raise refused(status.message, "lora_path")

    def unload(self, name: str) -> bool:
        """Serve an adapter no longer; its running requests end well. Returns whether there was one."""
        if name not in self._served:
            return False
        self._from_file.discard(name)
        self._remove(name)
        return True

    # -- the life of the server

    async def start(self, loads: AdapterLoads, on_wait: Callable[[str], None]) -> None:
        """Begin to serve, now that the engine process is ready; return when all adapters of the settings and all
        pinned ones are known or refused.

        `on_wait` is called with the names that are waited for. Raises `PagemillError` for a refused adapter of the
        settings: the user who started the server reads it.
        """
        self._loads = loads
        for each in self._asked:
            if (taken := self._taken(each.name)) is not None:
                raise invalid_field("lora_modules", taken)
            self._begin(each, retries=False)
        if self._file is not None:
            self._file.read()
            self._keep(asyncio.create_task(self._file.follow(), name="adapters file"))
        while awaited := [each for each in self._served.values() if self._is_needed(each)]:
            names = [each.wanted.name for each in awaited]
            on_wait(", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else ""))
            await awaited[0].settled.wait()
        for served in self._served.values():
            if served.status.state == "refused" and served.wanted in self._asked:
                raise invalid_field("lora_modules", f"{served.wanted.name}: {served.status.message}")

    def used(self, use: AdapterUse) -> None:
        """Receive what the engine process reports of its adapters."""
        self._metrics.adapter_loads(use.num_loads - self._use.num_loads, use.num_evictions - self._use.num_evictions)
        self._use = use
        self._publish()

    def close(self) -> None:
        for task in [*self._work, *(each.work for each in self._served.values() if each.work is not None)]:
            task.cancel()

    # -- the file

    def _want(self, listed: WantedAdapters) -> None:
        """Serve what the file lists."""
        self._conflicts = []
        found: dict[str, WantedAdapter] = {}
        for each in listed.adapters:
            taken = f"Two adapters are named `{each.name}`; the first is served." if each.name in found else None
            if each.name not in self._from_file:
                taken = taken or self._taken(each.name)
            if taken is None:
                found[each.name] = each
            else:
                self._conflicts.append(_refusal(each, "NameConflict", f"{taken} Give it another name."))
        for name in self._from_file - found.keys():
            self._remove(name)
        self._from_file = set(found)
        for name, each in found.items():
            served = self._served.get(name)
            if served is None or served.wanted != each:
                self._begin(each, retries=True)
        self._publish()

    # -- one adapter

    def _is_needed(self, served: _Served) -> bool:
        """Whether the server is not ready before the adapter is known or refused."""
        return not served.settled.is_set() and (served.wanted.pinned or served.wanted in self._asked)

    def _taken(self, name: str) -> str | None:
        if not name.strip():
            return "An adapter needs a name."
        if name in self._names:
            return f"`{name[:200]}` is the name of the model."
        return f"There is an adapter `{name[:200]}` already." if name in self._served else None

    def _begin(self, wanted: WantedAdapter, *, retries: bool) -> _Served:
        """Begin to serve an adapter, in place of one of the same name."""
        before = self._served.get(wanted.name)
        digest = "" if before is None else before.status.digest
        status = AdapterStatus(
            name=wanted.name, source=wanted.source, state="fetching", digest=digest, pinned=wanted.pinned
        )
        served = self._served[wanted.name] = _Served(wanted, status, int(time.time()))
        if before is not None:
            _end(before)
        served.work = asyncio.create_task(self._serve(served, retries), name=f"adapter {wanted.name}")
        self._publish()
        return served

    def _remove(self, name: str) -> None:
        served = self._served.pop(name)
        _end(served)
        self._forget_unused(served.status.digest)
        self._publish()

    async def _serve(self, served: _Served, retries: bool) -> None:
        pause_s = FIRST_PAUSE_S
        while not await self._try(served) and retries:
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _try(self, served: _Served) -> bool:
        """Fetch and read an adapter. Returns whether it is known."""
        wanted, loads = served.wanted, self._loads
        assert loads is not None
        try:
            async with self._fetches:
                path = await asyncio.wrap_future(_on_thread(lambda: resolve_adapter(wanted.source, "source")))
            reading = asyncio.create_task(loads.load(path, pinned=wanted.pinned))
            try:
                read = await asyncio.shield(reading)
            except asyncio.CancelledError:
                reading.add_done_callback(self._forget_read)
                raise
        except (SourceError, AdapterError) as error:
            refusal = _refusal(wanted, error.reason, error.message)
            self._settle(served, msgspec.structs.replace(refusal, digest=served.status.digest))
            return False
        status = msgspec.structs.replace(
            served.status, state="known", digest=read.digest, message=read.message, reason=""
        )
        self._settle(served, status)
        return True

    def _settle(self, served: _Served, status: AdapterStatus) -> None:
        before, served.status = served.status, status
        if before.digest != status.digest:
            self._forget_unused(before.digest)
        if status.state == "refused" and status != before:
            logger.warning("the adapter %s is refused: %s", status.name, status.message)
        served.settled.set()
        self._publish()

    def _forget_read(self, reading: asyncio.Task[AdapterRead]) -> None:
        """Forget an adapter that became known after it was removed."""
        if not reading.cancelled() and reading.exception() is None:
            self._forget_unused(reading.result().digest)

    def _forget_unused(self, digest: str) -> None:
        """Forget a digest that no name stands for any more."""
        assert self._loads is not None
        if digest and all(each.status.digest != digest for each in self._served.values()):
            self._loads.forget(digest)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _publish(self) -> None:
        known = [*(each.status for each in self._served.values()), *self._conflicts]
        self._publisher.announce_adapters(msgspec.structs.replace(self._use.slots, known=known))
        self._metrics.adapters(
            self._max_loras, self._named(self._use.running), self._named(self._use.waiting), known, self._use.slots
        )

    def _named(self, digests: Iterable[str]) -> list[str]:
        names = {each.status.digest: name for name, each in self._served.items()}
        return sorted(names[digest] for digest in digests if digest in names)


def _end(served: _Served) -> None:
    if served.work is not None:
        served.work.cancel()
    served.settled.set()


def _refusal(wanted: WantedAdapter, reason: str, message: str) -> AdapterStatus:
    return AdapterStatus(
        name=wanted.name, source=wanted.source, state="refused", reason=reason, message=message, pinned=wanted.pinned
    )


def _on_thread(work: Callable[[], Path]) -> Future[Path]:
    """Run a fetch on a thread of its own, which may take hours and does not keep the process from ending."""
    future: Future[Path] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="fetch adapter", daemon=True).start()
    return future
