"""One kind of object, kept up to date for ever: list, watch from there, again after whatever happens.

A fault never forgets what is known: the store changes only by what the server says. Pauses between attempts grow and
are jittered; a watch that ends in good order goes on at once from where it was.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, TypeVar

import msgspec

from pagemill_gateway.config import KubernetesConfig
from pagemill_gateway.discovery.kubernetes.api import FAULTS, ApiClient, Event, Gone
from pagemill_gateway.discovery.kubernetes.credentials import CredentialsError
from pagemill_gateway.discovery.kubernetes.objects import EndpointSlice, LLMDeployment, Secret

logger = logging.getLogger("pagemill.gateway.kubernetes")

Object = TypeVar("Object", LLMDeployment, EndpointSlice, Secret)
Key = tuple[str, str]
WATCH_S = (20, 30)
"""
The server is asked to end a watch after so long: one that neither speaks nor ends is dead, and found out soon. It goes
on from where it was, which costs the server next to nothing.
"""
QUICK_WATCH_PAUSE_S = 0.1
"""Between watches that end in good order, so that a server which ends each at once is not hammered."""


class _Versioned(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Bookmark(msgspec.Struct):
    metadata: _Versioned


class ListWatch(Generic[Object]):
    def __init__(
        self,
        api: ApiClient,
        kind: type[Object],
        path: str,
        selector: dict[str, str],
        config: KubernetesConfig,
        on_change: Callable[[], None],
    ) -> None:
        self.objects: dict[Key, Object] = {}
        """By namespace and name. Read it; only the watch writes."""
        self.listed = False
        """The server has answered once."""
        self.fault: str | None = "the API server has not answered yet"
        """Why it is not up to date, if so."""
        self._api = api
        self._decoder: msgspec.json.Decoder[Object] = msgspec.json.Decoder(kind)
        self._path = path
        self._selector = selector
        self._config = config
        self._on_change = on_change
        self._version = ""

    async def run(self) -> None:
        """Never returns."""
        pause_s = self._config.backoff_base_s
        while True:
            fault = await self._attempt()
            if fault is None:
                pause_s = self._config.backoff_base_s
                await asyncio.sleep(QUICK_WATCH_PAUSE_S)
                continue
            if self.fault is None:
                logger.warning("watch of %s: %s; what is known stays in use", self._path, fault)
                pause_s = self._config.backoff_base_s
            self._set_fault(fault)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(self._config.backoff_max_s, pause_s * 2)

    async def _attempt(self) -> str | None:
        """List if need be, watch once; what went wrong, if anything did."""
        try:
            if not self._version:
                await self._list()
            await self._watch()
        except Gone as gone:
            logger.info("watch of %s begins anew: %s", self._path, gone)
            self._version = ""
        except CredentialsError as error:
            return str(error)
        except FAULTS as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            # What one object or one answer does to this loop must not end it.
            logger.exception("watch of %s failed", self._path)
            self._version = ""
            return f"{type(error).__name__}: {error}"
        return None

    async def _list(self) -> None:
        page = await self._api.list(self._path, self._selector)
        objects: dict[Key, Object] = {}
        for raw in page.items:
            decoded = self._decode(raw)
            if decoded is not None:
                objects[_key(decoded)] = decoded
        changed = objects != self.objects or not self.listed
        self.objects, self._version, self.listed = objects, page.resource_version, True
        self._set_fault(None)
        if changed:
            self._on_change()

    async def _watch(self) -> None:
        events = self._api.watch(
            self._path,
            self._selector,
            self._version,
            timeout_s=random.randint(*WATCH_S),
            idle_timeout_s=self._config.watch_idle_timeout_s,
            on_open=lambda: self._set_fault(None),
        )
        async with aclosing(events):
            async for event in events:
                self._apply(event)

    def _apply(self, event: Event) -> None:
        version = msgspec.json.decode(event.object, type=_Bookmark).metadata.resource_version
        if event.kind != "BOOKMARK":
            self._take(event)
        self._version = version or self._version

    def _take(self, event: Event) -> None:
        decoded = self._decode(event.object)
        if decoded is None:
            return
        key = _key(decoded)
        if event.kind == "DELETED":
            if self.objects.pop(key, None) is not None:
                self._on_change()
        elif self.objects.get(key) != decoded:
            self.objects[key] = decoded
            self._on_change()

    def _decode(self, raw: msgspec.Raw) -> Object | None:
        """An object that makes no sense must not stop the others: the last sensible version of it stays."""
        try:
            return self._decoder.decode(raw)
        except msgspec.DecodeError as error:
            logger.warning("an object of %s cannot be read: %s", self._path, error)
            return None

    def _set_fault(self, fault: str | None) -> None:
        if fault is None and self.fault is not None:
            logger.info("watch of %s is up to date", self._path)
        self.fault = fault


def _key(decoded: LLMDeployment | EndpointSlice | Secret) -> Key:
    return decoded.metadata.namespace, decoded.metadata.name
