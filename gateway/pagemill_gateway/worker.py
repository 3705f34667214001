"""The parts between a client's connection and an engine's, in one object that the routes of the data port share.

It is opened inside the event loop and closed after the drain. The parts that exist once in a gateway are in
`control_process`, in this process or another one. A worker calls them through `pagemill_routing.brain.interface`,
`limits.store` and `ports`, and shares no state with them.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from starlette.types import ASGIApp

from pagemill_api.grammars.check import CHECKS
from pagemill_gateway.batches.directory import DirectoryStore
from pagemill_gateway.batches.idle import IdleCapacity
from pagemill_gateway.batches.line_sender import LineSender
from pagemill_gateway.batches.resources import BatchResources
from pagemill_gateway.batches.runner import BatchRunner
from pagemill_gateway.batches.service import Batches
from pagemill_gateway.batches.store import BatchStore
from pagemill_gateway.config import BatchesConfig, GatewayConfig, RedisConfig, open_keys_file
from pagemill_gateway.discovery.bundles import BundleError, Bundles
from pagemill_gateway.limits.in_flight_limit import InFlightLimit, RunningRequests
from pagemill_gateway.limits.limiter import Limiter
from pagemill_gateway.limits.store import Store
from pagemill_gateway.metrics.worker import WorkerMetrics
from pagemill_gateway.ports import ControlProcessPort, WorkerMeasurements
from pagemill_gateway.relay.keep_alive import KeepAlive
from pagemill_gateway.relay.preparation import RequestPreparation
from pagemill_gateway.relay.relay import Relay
from pagemill_gateway.relay.upstream import Upstream
from pagemill_protocol.errors import PagemillError
from pagemill_routing.brain.interface import Brain
from pagemill_servers.keys.caller import Caller
from pagemill_servers.keys.ring import KeyRing
from pagemill_servers.tracing.tracing import open_tracing

logger = logging.getLogger("pagemill.gateway.worker")

SWITCH_INTERVAL_S = 0.0005
"""A tokenizing thread needs the interpreter several times, and each time the event loop may keep it for this long."""


def open_batch_store(config: BatchesConfig, redis: RedisConfig | None) -> BatchStore:
    """Open the store of files and batches. Raises `SettingsError`."""
    if config.directory:
        return DirectoryStore(config.directory)
    from pagemill_gateway.batches.redis import RedisBatchStore

    assert redis is not None  # `GatewayConfig.checked`
    return RedisBatchStore(redis)


class Worker:
    """The worker. Create and use it inside a running event loop; `close` frees everything."""

    def __init__(
        self,
        config: GatewayConfig,
        brain: Brain,
        store: Store,
        control: ControlProcessPort,
        bundles: Bundles | None = None,
    ) -> None:
        """`bundles` are those of the control process, if it is in this process."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.config = config
        self.brain = brain
        self.control = control
        self.draining = False
        shares_keys = config.redis is not None and config.redis.keys
        self.keys = KeyRing(config.api_keys, open_keys_file(config.api_keys_file, quiet=True), shared=shares_keys)
        bounds = config.bounds_of_one_worker()
        self.in_flight_limit = InFlightLimit(bounds.max_requests, bounds.max_body_bytes)
        self.running = RunningRequests()
        self.metrics = WorkerMetrics()
        self.limiter = Limiter(store, self.metrics)
        self.tracing = open_tracing(config.tracing)
        self._owns_bundles = bundles is None
        self.bundles = bundles if bundles is not None else Bundles(None, source=control.bundle)
        self._loading: set[asyncio.Task[None]] = set()
        self.background: set[asyncio.Task[None]] = set()
        """Responses that are generated without a client."""
        CHECKS.max_form_chars = config.max_form_chars
        self._keep_alive = KeepAlive(config.keep_alive_interval_s)
        self.preparation = RequestPreparation(
            brain,
            self.bundles,
            self._keep_alive,
            config.remembered_prefix_chunks,
            config.max_answer_values,
            config.chat_control_tokens,
            config.hosted_tools,
        )
        self._upstream = Upstream(config)
        self.relay = Relay(
            brain,
            self._upstream,
            self.metrics,
            self._keep_alive,
            max_attempts=config.max_attempts,
            journal_tokens=bounds.journal_tokens,
        )

        self._batch_store = open_batch_store(config.batches, config.redis) if config.batches is not None else None
        self.batches: Batches | None = None
        """`None` if batches are turned off."""
        self.batch_runner: BatchRunner | None = None
        if config.batches is not None and self._batch_store is not None:
            self.batches = Batches(config.batches, self._batch_store)

    def run_batches(self, app: ASGIApp) -> None:
        """Start running batches. `app` has the generating routes."""
        config = self.config.batches
        if config is None or self._batch_store is None:
            return
        idle = IdleCapacity(self.brain, config.max_load, lambda: self.draining)
        resources = BatchResources(
            config,
            self._batch_store,
            LineSender(app, self.keys),
            idle,
            max_line_bytes=self.config.max_body_bytes,
            max_in_flight_bytes=self.config.bounds_of_one_worker().max_body_bytes,
        )
        self.batch_runner = BatchRunner(resources)

    # Calls of the control process.

    async def measure(self) -> WorkerMeasurements:
        self.metrics.follow_keys(self.keys.callers)
        return self.measures()

    @property
    def num_measured(self) -> int:
        return self.metrics.num_updates

    def measures(self) -> WorkerMeasurements:
        samples = self.metrics.samples(
            body_bytes=self.in_flight_limit.num_bytes, journal_tokens=self.relay.journal_capacity.num_tokens
        )
        tenants = frozenset(each.tenant for each in self.keys.callers)
        return WorkerMeasurements(samples, self.in_flight_limit.num_in_flight, tenants)

    def keep_bundles(self, digests: frozenset[str], templates: frozenset[str], *, whole: bool) -> None:
        """Keep these bundles, and load new ones at once, so that the first client need not wait."""
        if not self._owns_bundles:
            return
        if whole:
            self.bundles.forget_all_but(digests, templates)
        for digest in digests - self.bundles.digests:
            self._loading.add(task := asyncio.create_task(self._load(digest)))
            task.add_done_callback(self._loading.discard)

    def replace_shared_keys(self, callers: list[Caller]) -> None:
        self.keys.replace_shared(callers)

    def refuse_contents(self, contents: frozenset[bytes]) -> None:
        self.relay.refused_contents = contents

    async def close(self) -> None:
        if self.batch_runner is not None:
            await self.batch_runner.close()
        if self._batch_store is not None:
            await self._batch_store.close()
        for task in (*self._loading, *self.background):
            task.cancel()
        await asyncio.gather(*self._loading, *self.background, return_exceptions=True)
        self._keep_alive.close()
        await self._upstream.close()
        await self.tracing.close()
        self.preparation.close()
        if self._owns_bundles:
            await self.bundles.close()

    async def _load(self, digest: str) -> None:
        try:
            await self.bundles.load(digest)
        except (BundleError, PagemillError) as error:
            logger.warning("a tokenizer cannot be made ready: %s", error)
