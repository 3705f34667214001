"""Keeps a gateway's catalogue equal to the cluster's objects: watches them, applies catalogues, stores the latest one.

A burst of changes leads to one new catalogue. Until every watch has listed its objects, the catalogue is the last known
one, or none. Later, an unreachable API server changes nothing. Namespaces that refuse access are left out. A catalogue
applies at once, however long the disk takes to store it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pagemill_gateway.config import KubernetesConfig
from pagemill_gateway.discovery.kubernetes.builder import build_catalog
from pagemill_gateway.discovery.kubernetes.objects import EndpointSlice, Secret, WatchedDeployment
from pagemill_gateway.discovery.last_known import LastKnown, read_last_known, write_last_known
from pagemill_kube.client import Client
from pagemill_kube.credentials import Credentials
from pagemill_kube.kinds import Kind
from pagemill_kube.list_watch import Intervals, ListWatch
from pagemill_protocol.catalog import Catalog
from pagemill_protocol.engine_token import CURRENT, GATEWAY_CONTROL, MIN_KEY_BYTES, NEXT, PREVIOUS, EngineKeys

logger = logging.getLogger("pagemill.gateway.kubernetes")

# `pagemill_crds.STORED_VERSION`, which is not installed with the gateway. A test compares the two.
LLM_DEPLOYMENTS = Kind("LLMDeployment", "pagemill.dev", "v1beta1", "llmdeployments")
ENDPOINT_SLICES = Kind("EndpointSlice", "discovery.k8s.io", "v1", "endpointslices")
SECRETS = Kind("Secret", "", "v1", "secrets")
SLICES = {"labelSelector": "app.kubernetes.io/name=pagemill-engine"}
MIN_INTERVAL_S = 0.05
"""The pause between two catalogues is at least this and at least `REST` times the time that the last one took to build
and apply."""
REST = 10.0


class KubernetesDiscovery:
    def __init__(
        self, config: KubernetesConfig, credentials: Credentials, apply_catalog: Callable[[Catalog], None]
    ) -> None:
        """Create it inside a running event loop; `start` begins the watches."""
        self.control_tokens: tuple[str, ...] = ()
        """The tokens that the control port accepts; empty before the keys are known."""
        self.known = False
        """Whether there is a catalogue, the current or the last known one."""
        self._config = config
        self._apply_catalog = apply_catalog
        self._client = Client(credentials)
        self._changed, self._unwritten = asyncio.Event(), asyncio.Event()
        self._published: LastKnown | None = None
        self._written: LastKnown | None = None
        self._write_fault = ""
        self._keys: EngineKeys | None = None
        self._keys_fault = ""
        self._tasks: list[asyncio.Task[None]] = []
        intervals = Intervals(config.backoff_base_s, config.backoff_max_s, config.watch_idle_timeout_s)
        namespaces = [*config.namespaces] or [""]

        def watch(kind: Any, path: str, selector: dict[str, str]) -> ListWatch[Any]:
            return ListWatch(self._client, kind, path, selector, intervals, self._changed.set)

        self._deployments: list[ListWatch[WatchedDeployment]] = [
            watch(WatchedDeployment, LLM_DEPLOYMENTS.path(each), {}) for each in namespaces
        ]
        self._slices: list[ListWatch[EndpointSlice]] = [
            watch(EndpointSlice, ENDPOINT_SLICES.path(each), SLICES) for each in namespaces
        ]
        secret = config.keys_secret
        self._secrets: ListWatch[Secret] = watch(
            Secret, SECRETS.path(secret.namespace), {"fieldSelector": f"metadata.name={secret.name}"}
        )

    @property
    def detail(self) -> str:
        """The fault for status messages; empty if all objects are up to date."""
        faults = [f"{watch.path}: {watch.fault}" for watch in self._watches() if watch.fault is not None]
        return (faults[0] if faults else "") or self._keys_fault

    def start(self) -> None:
        last = read_last_known(Path(self._config.last_known_file))
        if last is not None:
            self._published = self._written = last
            self.control_tokens = tuple(last.control_tokens)
            self._publish(last.catalog)
            logger.info("%d models from the last known catalogue", len(last.catalog.models))
        self._tasks = [asyncio.create_task(watch.run()) for watch in self._watches()]
        self._tasks += [asyncio.create_task(self._keep_building()), asyncio.create_task(self._keep_writing())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def _watches(self) -> list[ListWatch[Any]]:
        return [*self._deployments, *self._slices, self._secrets]

    async def _keep_building(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait()
            self._changed.clear()
            started = loop.time()
            try:
                self._build()
            except Exception:
                logger.exception("a catalogue could not be built; the one before stays in use")
            await asyncio.sleep(max(MIN_INTERVAL_S, REST * (loop.time() - started)))

    async def _keep_writing(self) -> None:
        while True:
            await self._unwritten.wait()
            self._unwritten.clear()
            known = self._published
            if known is not None and known != self._written:
                await asyncio.to_thread(self._write, known)

    def _build(self) -> None:
        self._read_keys()
        if self._keys is None or not self._settled:
            return
        deployments = chain.from_iterable(watch.objects.values() for watch in self._deployments)
        slices = chain.from_iterable(watch.objects.values() for watch in self._slices)
        known = LastKnown(build_catalog(deployments, slices, self._keys), list(self.control_tokens))
        if known != self._published:
            self._publish(known.catalog)
            self._published = known
        self._unwritten.set()

    @property
    def _settled(self) -> bool:
        """Whether every watch was listed or refused. A refused namespace must not block the others."""
        return self._secrets.listed and all(_answered(watches) for watches in (self._deployments, self._slices))

    def _write(self, known: LastKnown) -> None:
        """Write the last known catalogue. A failed write is retried with the next change."""
        path = Path(self._config.last_known_file)
        try:
            write_last_known(path, known)
        except OSError as error:
            fault = error.strerror or str(error)
            if fault != self._write_fault:
                logger.warning("the catalogue cannot be kept in %s: %s", path, fault)
            self._write_fault = fault
            return
        self._written, self._write_fault = known, ""

    def _publish(self, catalog: Catalog) -> None:
        self._apply_catalog(catalog)
        self.known = True

    def _read_keys(self) -> None:
        """Read the keys from the Secret. If it is deleted or invalid, the previous keys stay in use."""
        secret = next(iter(self._secrets.objects.values()), None)
        wanted = self._config.keys_secret
        if secret is None:
            self._keys_fault = f"the Secret {wanted.namespace}/{wanted.name} does not exist; the operator makes it"
            return
        try:
            self._keys = keys_of(secret)
        except KeysError as error:
            self._keys_fault = f"the Secret {wanted.namespace}/{wanted.name} cannot be used: {error}"
            return
        self._keys_fault = ""
        self.control_tokens = self._keys.accepted(*GATEWAY_CONTROL)


def _answered(watches: Sequence[ListWatch[Any]]) -> bool:
    """Whether all watches were listed or refused, and not all were refused: then the kind is missing or forbidden."""
    return any(watch.listed for watch in watches) and all(watch.listed or watch.refused for watch in watches)


class KeysError(ValueError):
    """The Secret has no valid keys. The message never shows its contents."""


def keys_of(secret: Secret) -> EngineKeys:
    """Return the keys in the Secret; a missing next or previous key is the current one. Raises `KeysError`."""
    data = secret.data or {}
    current = _key(data, CURRENT)
    if current is None:
        raise KeysError(f"it has no `{CURRENT}`")
    return EngineKeys(current, _key(data, NEXT) or current, _key(data, PREVIOUS) or current)


def _key(data: dict[str, str], name: str) -> bytes | None:
    text = data.get(name)
    if not text:
        return None
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise KeysError(f"`{name}` is no base64") from None
    if len(key) < MIN_KEY_BYTES:
        raise KeysError(f"`{name}` has {len(key)} bytes; at least {MIN_KEY_BYTES} make a secret")
    return key
