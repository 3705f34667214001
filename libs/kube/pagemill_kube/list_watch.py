"""Keep one kind of object up to date: list, watch from there, and start again after any fault.

A fault never discards known objects: only the server's answers change the store. Pauses between attempts grow and are
jittered; a watch that ends regularly is continued at once from its resource version.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, NamedTuple, TypeVar

import msgspec

from pagemill_kube.client import Client, WatchEvent
from pagemill_kube.errors import ApiError, Gone, Unreachable

logger = logging.getLogger("pagemill.kube")

Object = TypeVar("Object", bound=msgspec.Struct)
FAULTS = (ApiError, Unreachable, msgspec.DecodeError, UnicodeDecodeError)
Key = tuple[str, str]
WATCH_S = (20, 30)
"""Range in seconds after which the server is asked to end a watch, so that a dead one is noticed soon. The next watch
continues from its resource version, at almost no cost for the server."""
QUICK_WATCH_PAUSE_S = 0.1
"""Pause between watches that end regularly, for a server that ends each at once."""
REFUSALS = frozenset({403, 404})
NUM_REFUSALS = 4
"""Refusals before a namespace counts as refused: new permissions take a moment to reach the server."""


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    namespace: str = ""
    name: str = ""


class _Bare(msgspec.Struct):
    """The fields of any object."""

    metadata: _Metadata


class Intervals(NamedTuple):
    backoff_base_s: float
    backoff_max_s: float
    """First and longest pause between attempts to reach the API server; the actual pause is drawn from its upper
    half."""
    idle_timeout_s: float
    """Seconds without data after which a watch is opened again."""


class ListWatch(Generic[Object]):
    def __init__(
        self,
        client: Client,
        kind: type[Object],
        path: str,
        selector: dict[str, str],
        intervals: Intervals,
        on_change: Callable[[], None],
    ) -> None:
        self.objects: dict[Key, Object] = {}
        """Objects by namespace and name. Only the watch writes it."""
        self.listed = False
        """Whether the server has answered at least once."""
        self.fault: str | None = "the API server has not answered yet"
        """Why the objects are not up to date, or None."""
        self.refused = False
        """Whether the server refuses and has never answered: the namespace is gone, or forbidden to this gateway."""
        self.path = path
        self._client = client
        self._decoder: msgspec.json.Decoder[Object] = msgspec.json.Decoder(kind)
        self._selector = selector
        self._intervals = intervals
        self._on_change = on_change
        self._version = ""
        self._num_refusals = 0
        self._was_gone = False

    async def run(self) -> None:
        """List and watch for ever."""
        loop = asyncio.get_running_loop()
        pause_s = self._intervals.backoff_base_s
        while True:
            started = loop.time()
            fault = await self._attempt()
            # Successful lists between failing watches must not shorten the pauses.
            if fault is None or loop.time() - started > self._intervals.backoff_max_s:
                pause_s = self._intervals.backoff_base_s
            if fault is None:
                await asyncio.sleep(QUICK_WATCH_PAUSE_S)
                continue
            if self.fault is None:
                logger.warning("watch of %s: %s; what is known stays in use", self.path, fault)
            self._set_fault(fault)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(self._intervals.backoff_max_s, pause_s * 2)

    async def _attempt(self) -> str | None:
        """List if needed, watch once. Returns the fault, or None."""
        try:
            if not self._version:
                await self._list()
            await self._watch()
            self._was_gone = False
        except Gone as gone:
            return self._list_again(gone)
        except FAULTS as error:
            if isinstance(error, ApiError) and error.status in REFUSALS:
                self._count_refusal(error)
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            # An error with one object or one answer must not end this loop.
            logger.exception("watch of %s failed", self.path)
            self._version = ""
            return f"{type(error).__name__}: {error}"
        return None

    def _list_again(self, gone: Gone) -> str | None:
        """List again next time. Once is the normal course of a watch; repeated, it is a fault."""
        logger.info("watch of %s begins anew: %s", self.path, gone)
        self._version = ""
        again, self._was_gone = self._was_gone, True
        return f"the watch cannot go on: {gone}" if again else None

    def _count_refusal(self, error: ApiError) -> None:
        if self.listed or self.refused:
            return
        self._num_refusals += 1
        if self._num_refusals >= NUM_REFUSALS:
            logger.warning("%s is left out: the API server answers %s", self.path, error)
            self.refused = True
            self._on_change()

    async def _list(self) -> None:
        page = await self._client.list(self.path, self._selector)
        objects: dict[Key, Object] = {}
        for raw in page.items:
            key = _key(raw)
            decoded = self._decode(raw) or self.objects.get(key)
            if decoded is not None:
                objects[key] = decoded
        changed = objects != self.objects or not self.listed
        self.objects, self._version, self.listed = objects, page.resource_version, True
        self.refused = False
        self._set_fault(None)
        if changed:
            self._on_change()

    async def _watch(self) -> None:
        events = self._client.watch(
            self.path,
            self._selector,
            self._version,
            timeout_s=random.randint(*WATCH_S),
            idle_timeout_s=self._intervals.idle_timeout_s,
            on_open=lambda: self._set_fault(None),
        )
        async with aclosing(events):
            async for event in events:
                self._apply(event)

    def _apply(self, event: WatchEvent) -> None:
        self._was_gone = False
        version = msgspec.json.decode(event.object, type=_Bare).metadata.resource_version
        if event.kind != "BOOKMARK":
            self._take(event)
        self._version = version or self._version

    def _take(self, event: WatchEvent) -> None:
        key = _key(event.object)
        if event.kind == "DELETED":
            if self.objects.pop(key, None) is not None:
                self._on_change()
            return
        decoded = self._decode(event.object)
        if decoded is not None and self.objects.get(key) != decoded:
            self.objects[key] = decoded
            self._on_change()

    def _decode(self, raw: msgspec.Raw) -> Object | None:
        """Return the object, or None for an invalid one: it must not stop the others, and its last valid version
        stays."""
        try:
            return self._decoder.decode(raw)
        except msgspec.DecodeError as error:
            logger.warning("an object of %s cannot be read: %s", self.path, error)
            return None

    def _set_fault(self, fault: str | None) -> None:
        if fault is None and self.fault is not None:
            logger.info("watch of %s is up to date", self.path)
        self.fault = fault


def _key(raw: msgspec.Raw) -> Key:
    """Return namespace and name; empty texts without a valid name."""
    try:
        metadata = msgspec.json.decode(raw, type=_Bare).metadata
    except msgspec.DecodeError:
        return "", ""
    return metadata.namespace, metadata.name
