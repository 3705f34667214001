"""The parts that exist once in a gateway: discovery, the brain, the store of limits, and the metrics of all processes.

It is opened inside the event loop and closed after the drain. Workers (`worker`) have the connections of clients. They
call `ports.ControlProcessPort`, and are called through `ports.WorkerPort`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable
from pathlib import Path

import aiohttp
import orjson

from pagemill_gateway.config import GatewayConfig, SettingsError, open_keys_file
from pagemill_gateway.control_token import control_tokens
from pagemill_gateway.discovery.bundles import BundleError, Bundles
from pagemill_gateway.discovery.kubernetes.discovery import KubernetesDiscovery
from pagemill_gateway.discovery.last_known import keep_catalog, read_served_before
from pagemill_gateway.discovery.state_streams import StateStreams
from pagemill_gateway.limits.sharing import Sharing, open_sharing
from pagemill_gateway.metrics.control_process import ControlProcessMetrics
from pagemill_gateway.ports import GatewayStatus, PlotPoint, WhatIf, WorkerMeasurements, WorkerPort
from pagemill_gateway.stored_responses.store import open_responses
from pagemill_gateway.ui.fleet import describe_fleet
from pagemill_gateway.ui.history import LoadHistory
from pagemill_gateway.ui.scaling import ScalingDecisions
from pagemill_gateway.ui.what_if import answer_what_if
from pagemill_kube.credentials import Credentials, from_kubeconfig, in_cluster
from pagemill_kube.errors import CredentialsError
from pagemill_protocol.catalog import Catalog
from pagemill_protocol.errors import unavailable
from pagemill_protocol.metrics import Scrape
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.resilience.poison_memory import Poison
from pagemill_servers.keys.caller import Caller
from pagemill_servers.secrets.secret_file import CHECK_INTERVAL_S, SecretFile
from pagemill_servers.secrets.token_file import GeneratedTokens
from pagemill_servers.tls.certificates import EngineTrust

logger = logging.getLogger("pagemill.gateway")
keys_logger = logging.getLogger("pagemill.gateway.keys")

SETTLE_TIMEOUT_S = 20.0
"""The longest time after the start that unresponsive engines delay the readiness."""
POISON_INTERVAL_S = 1.0
"""How often gateways ask each other which requests crash engines."""
RECOUNT_TIMEOUT_S = 1.0
"""Workers try to connect to the new process twenty times a second."""
WRONG_KEYS_FILE = "api_keys_file cannot be used as it is now; the keys known before stay in use, the log names the line"
"""The message for the readiness probe, which names neither path nor line, because every caller sees it."""
DECISION_IDS_PER_PROCESS = 2**40
"""The numbers of decisions that each control process of a gateway may use, so that none is used twice."""


class ControlProcess:
    """The control process. Create and use it inside a running event loop; `close` frees everything."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        keeps_tokenizers: bool = True,
        catalog_file: Path | None = None,
        num_before: int = 0,
    ) -> None:
        """`keeps_tokenizers`: whether a worker in this process uses tokenizers. `catalog_file`: the file with a static
        catalogue for the next control process. `num_before`: the number of control processes before this one.
        """
        self.config = config
        self.started_unix_s = int(time.time())
        self._started_at = time.monotonic()
        self._was_ready = False
        self._catalog_file = catalog_file
        self.draining = False
        self.closing = asyncio.Event()
        """Set after the drain, to end endless streams."""
        self.control_tokens = control_tokens(config, self._derived_tokens)
        """The tokens that the control port accepts."""
        credentials = _credentials(config) if config.discovery == "kubernetes" else None
        self.metrics = ControlProcessMetrics()
        self.metrics.catalog_own(bool(config.catalog.models))
        self.metrics.control_process_restarted(num_before)
        self.brain = LocalBrain(
            config,
            keeps_terminating=config.discovery == "kubernetes",
            first_decision=num_before * DECISION_IDS_PER_PROCESS,
            generated_token=GeneratedTokens().find,
        )
        self._workers: list[WorkerPort] = []
        self.recount = Recount(config.workers if num_before else 0)
        self._shared_keys: list[Caller] | None = None
        self._templates: frozenset[str] = frozenset()
        self.sharing: Sharing = open_sharing(
            config.redis, on_fallback=self.metrics.decided_without_redis, on_keys=self._publish_keys
        )
        self._refused: frozenset[bytes] = frozenset()
        self._sending: set[asyncio.Task[None]] = set()
        self.brain.poison_memory.on_remembered = self._share_poison
        self._poison_watch = asyncio.create_task(self._watch_poison())
        self._history = LoadHistory(self.brain.reader)
        self.scaling_decisions = ScalingDecisions()
        self._sampling = asyncio.create_task(self._history.run())
        self._responses = open_responses(config.stored_responses, self.sharing.link)
        trust = EngineTrust(config.engine_tls.ca_file, config.engine_tls.server_name)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=trust), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        )
        self.bundles = Bundles(self.session, keeps_tokenizers=keeps_tokenizers, on_change=self._publish_bundles)
        self._streams = StateStreams(self.session, trust, self.brain.observer, self.bundles, config)
        self.discovery: KubernetesDiscovery | None = None
        if credentials is not None:
            self.discovery = KubernetesDiscovery(config.kubernetes, credentials, self.apply_catalog)
            self.discovery.start()
        else:
            served_before = read_served_before(catalog_file) if catalog_file is not None else None
            self.apply_catalog(served_before or config.catalog)
        self._keys_watch = KeysWatch(config.api_keys_file) if config.api_keys_file is not None else None

    # Calls of workers.

    async def status(self) -> GatewayStatus:
        return GatewayStatus(self.ready, self.draining, self.detail, self.started_unix_s)

    async def fleet(self) -> bytes:
        return orjson.dumps(describe_fleet(self.brain.reader, await self.status()))

    async def samples(self, after: int) -> list[PlotPoint]:
        return self._history.after(after)

    async def decisions(self, limit: int) -> bytes:
        return orjson.dumps({"decisions": self.brain.reader.placement.decisions.latest(limit)})

    async def scaling(self, limit: int) -> bytes:
        return self.scaling_decisions.latest(limit)

    async def what_if(self, question: WhatIf) -> bytes:
        return await answer_what_if(self.brain.reader, question)

    async def scrape(self, accept: str) -> Scrape:
        """Return the metrics of the control process and all workers."""
        measures = await self.measure()
        if self.sharing.up is not None:
            self.metrics.redis_up(self.sharing.up)
        self.metrics.keys_file_valid(self._keys_watch is None or not self._keys_watch.problem)
        current = self.discovery is None or not self.discovery.detail
        return self.metrics.scrape(self.brain.reader, measures, ready=self.ready, current=current, accept=accept)

    async def bundle(self, digest: str) -> bytes:
        try:
            return self.bundles.data(digest)
        except BundleError as error:
            raise unavailable(f"The model's tokenizer cannot be used: {error}", code="model_not_ready") from error

    async def keep_response(self, account: str, response_id: str, value: bytes) -> None:
        await self._responses.keep(account, response_id, value)

    async def kept_response(self, account: str, response_id: str) -> bytes | None:
        return await self._responses.get(account, response_id)

    async def forget_response(self, account: str, response_id: str) -> bool:
        return await self._responses.remove(account, response_id)

    # The workers.

    def attach(self, worker: WorkerPort) -> None:
        """Add a worker, and send it the bundles in use; it waits for this first message."""
        self._workers.append(worker)
        self._send_bundles(worker)
        if self._shared_keys is not None:
            worker.replace_shared_keys(self._shared_keys)
        if self._refused:
            worker.refuse_contents(self._refused)

    def detach(self, worker: WorkerPort, last: WorkerMeasurements) -> None:
        """Remove a worker that is gone, and keep its latest measurements."""
        self._workers.remove(worker)
        self.metrics.worker_left(last.samples, lost=not self.draining)

    async def measure(self) -> list[WorkerMeasurements]:
        return await asyncio.gather(*(worker.measure() for worker in self._workers))

    # Calls of discovery and platform.

    @property
    def ready(self) -> bool:
        """Whether the gateway accepts requests and has a catalogue, the current or the last known one.

        Once it is ready, only the drain ends that, not the loss of engines or the API server.
        """
        self._was_ready = self._was_ready or self._can_begin()
        return self._was_ready and not self.draining

    def _can_begin(self) -> bool:
        return self.discovery is None or self._has_asked_all()

    def _has_asked_all(self) -> bool:
        """Whether every expected engine has reported or failed, or `SETTLE_TIMEOUT_S` is over."""
        if self.discovery is not None and not self.discovery.known:
            return False
        return self._streams.settled or time.monotonic() - self._started_at > SETTLE_TIMEOUT_S

    @property
    def detail(self) -> str:
        """The cause for status messages, if something is missing or out of date; otherwise empty."""
        if self.draining:
            return "the gateway is shutting down"
        if self.discovery is not None and (self.discovery.detail or not self._was_ready):
            return self.discovery.detail or "connecting to the engines"
        return WRONG_KEYS_FILE if self._keys_watch is not None and self._keys_watch.problem else ""

    def apply_catalog(self, catalog: Catalog) -> None:
        """Apply a catalogue. Requests in progress finish at their engines."""
        if self._catalog_file is not None and self.discovery is None:
            keep_catalog(self._catalog_file, catalog)
        self.brain.observer.apply_catalog(catalog)
        self._streams.sync()
        self._templates = frozenset(each.chat_template for each in catalog.models if each.chat_template is not None)
        self.bundles.forget_all_but(self.brain.registry.bundle_digests, self._templates)
        self._publish_bundles()

    async def close(self) -> None:
        if self.discovery is not None:
            await self.discovery.close()
        if self._keys_watch is not None:
            await self._keys_watch.close()
        self._poison_watch.cancel()
        self._sampling.cancel()
        await asyncio.gather(self._poison_watch, self._sampling, *self._sending, return_exceptions=True)
        await self._streams.close()
        await self.session.close()
        await self.sharing.close()
        await self.bundles.close()

    def _derived_tokens(self) -> tuple[str, ...]:
        return self.discovery.control_tokens if self.discovery is not None else ()

    def _publish_bundles(self) -> None:
        for worker in self._workers:
            self._send_bundles(worker)

    def _send_bundles(self, worker: WorkerPort) -> None:
        """Send the bundles in use. A worker may drop others only when all engines have reported what they use."""
        worker.keep_bundles(self.bundles.digests, self._templates, whole=self._has_asked_all())

    def _publish_keys(self, callers: list[Caller]) -> None:
        self._shared_keys = callers
        for worker in self._workers:
            worker.replace_shared_keys(callers)

    def _share_poison(self, poison: Poison, until: float) -> None:
        if self.sharing.poison is not None:
            self._sending.add(task := asyncio.create_task(self.sharing.poison.add(poison, until)))
            task.add_done_callback(self._sending.discard)
        self._publish_poison()

    def _publish_poison(self) -> None:
        """Send workers what is refused, if that has changed: with time, with other weights, by other gateways."""
        served = {each.weights_digest for each in self.brain.registry.endpoints.values()}
        refused = self.brain.poison_memory.refused(served)
        if refused != self._refused:
            self._refused = refused
            for worker in self._workers:
                worker.refuse_contents(refused)

    async def _watch_poison(self) -> None:
        while True:
            if self.sharing.poison is not None:
                self.brain.poison_memory.add(await self.sharing.poison.read())
            self._publish_poison()
            await asyncio.sleep(POISON_INTERVAL_S)


class KeysWatch:
    """Checks the file of API keys at an interval, so that logs, metrics and probes report an invalid file at once.

    Workers authenticate requests with key rings of their own (`pagemill_servers.keys.ring`), which read the file
    themselves and log nothing about it. Create it inside a running event loop.
    """

    def __init__(self, path: str) -> None:
        self.problem = ""
        """The error in the current file, because of which it is not used completely; empty if there is none."""
        self._path = path
        self._file: SecretFile | None = None
        self._look()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self._look()

    def _look(self) -> None:
        if self._file is None:
            self._open()
            return
        self._file.lines()
        self.problem = self._file.problem

    def _open(self) -> None:
        """Open the file. It may be invalid when this process starts as a replacement; workers keep the earlier keys."""
        try:
            self._file = open_keys_file(self._path)
        except SettingsError as error:
            if str(error) != self.problem:
                self.problem = str(error)
                keys_logger.error("%s", error)
            return
        assert self._file is not None
        self.problem = self._file.problem


class Recount:
    """Waits, after the control process was replaced, until workers have reported the limits that they have reserved.

    Otherwise the first worker could reserve places that another one still uses. A worker that does not return delays
    requests by `RECOUNT_TIMEOUT_S` at most. Create it inside a running event loop.
    """

    def __init__(self, num_workers: int) -> None:
        """`num_workers` must report; 0 if nothing was reserved before."""
        self._num_workers = num_workers
        self._reporting: set[Hashable] = set()
        self._over = asyncio.Event()
        if num_workers == 0:
            self._over.set()

    def reported_by(self, worker: Hashable) -> None:
        """Note that the worker's reservations are in the store again."""
        self._reporting.add(worker)
        if len(self._reporting) >= self._num_workers:
            self._over.set()

    async def done(self) -> None:
        """Wait for all workers, but at most `RECOUNT_TIMEOUT_S` from the first call on."""
        if self._over.is_set():
            return
        try:
            async with asyncio.timeout(RECOUNT_TIMEOUT_S):
                await self._over.wait()
        except TimeoutError:
            self._over.set()


def _credentials(config: GatewayConfig) -> Credentials:
    settings = config.kubernetes
    try:
        if settings.kubeconfig is None:
            return in_cluster(settings.api_server)
        return from_kubeconfig(Path(settings.kubeconfig), settings.api_server)
    except CredentialsError as error:
        raise SettingsError(f"discovery: the API server cannot be asked: {error}") from error
