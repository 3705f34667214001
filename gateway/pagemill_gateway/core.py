"""The gateway's parts, wired: one object the routes share, opened inside the event loop, closed after the drain."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from pagemill_gateway.admission.gate import Gate
from pagemill_gateway.admission.running import Running
from pagemill_gateway.brain.brain import LocalBrain
from pagemill_gateway.config import GatewayConfig, SettingsError, open_keys_file
from pagemill_gateway.discovery.bundles import Bundles
from pagemill_gateway.discovery.kubernetes.credentials import Credentials, CredentialsError, load_credentials
from pagemill_gateway.discovery.kubernetes.discovery import KubernetesDiscovery
from pagemill_gateway.discovery.state_streams import StateStreams
from pagemill_gateway.limits.keys import KeyRing
from pagemill_gateway.limits.limiter import Limiter
from pagemill_gateway.limits.sharing import Sharing, open_sharing
from pagemill_gateway.metrics import GatewayMetrics
from pagemill_gateway.relay.keep_alive import KeepAlive
from pagemill_gateway.relay.preparation import Preparation
from pagemill_gateway.relay.relay import Relay
from pagemill_gateway.relay.upstream import Upstream
from pagemill_gateway.tracing.tracing import open_tracing
from pagemill_protocol.catalog import Catalog

SETTLE_TIMEOUT_S = 20.0
"""After the start, engines that do not answer delay the readiness no longer than this."""
UPSTREAM_KEEPALIVE_S = 30.0
"""Idle connections to engines are dropped before the engine's own server would: a request must not race the hang-up."""


class Gateway:
    """Create and use inside a running event loop; `close` frees everything."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.started_unix_s = int(time.time())
        self._started_at = time.monotonic()
        self._was_ready = False
        self.draining = False
        self.closing = asyncio.Event()
        """The drain is over: what streams for ever ends now."""
        credentials = _credentials(config) if config.discovery == "kubernetes" else None
        shares_keys = config.redis is not None and config.redis.keys
        self.keys = KeyRing(config.api_keys, open_keys_file(config.api_keys_file), shared=shares_keys)
        self.gate = Gate(config.max_requests, config.max_in_flight_body_bytes)
        self.running = Running()
        self.metrics = GatewayMetrics()
        self.sharing: Sharing = open_sharing(config.redis, self.keys, self.metrics)
        self.limiter = Limiter(self.sharing.store, self.metrics)
        self.tracing = open_tracing(config.tracing)
        self.brain = LocalBrain(config)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=UPSTREAM_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )
        self.bundles = Bundles(self.session)
        self._keep_alive = KeepAlive(config.keep_alive_interval_s)
        self.preparation = Preparation(self.brain, self.bundles, self._keep_alive, config.remembered_granules)
        upstream = Upstream(self.session, config)
        self.relay = Relay(
            self.brain,
            upstream,
            self.metrics,
            self._keep_alive,
            max_attempts=config.max_attempts,
            journal_tokens=config.journal_tokens,
        )
        self._streams = StateStreams(self.session, self.brain, self.bundles, config)
        self.discovery: KubernetesDiscovery | None = None
        if credentials is not None:
            self.discovery = KubernetesDiscovery(config.kubernetes, credentials, self.apply_catalog)
            self.discovery.start()
        else:
            self.apply_catalog(config.catalog)

    @property
    def ready(self) -> bool:
        """It takes requests and knows whom to ask; a catalogue of before will do.

        Once it was ready, only the drain ends that: engines and the API server may come and go.
        """
        self._was_ready = self._was_ready or self._can_begin()
        return self._was_ready and not self.draining

    def _can_begin(self) -> bool:
        if self.discovery is None:
            return True
        if not self.discovery.known:
            return False
        return self._streams.settled or time.monotonic() - self._started_at > SETTLE_TIMEOUT_S

    @property
    def detail(self) -> str:
        """What is out of order, for people."""
        if self.draining:
            return "the gateway is shutting down"
        if self.discovery is None:
            return ""
        return self.discovery.detail or ("" if self._was_ready else "connecting to the engines")

    def apply_catalog(self, catalog: Catalog) -> None:
        """Serve `catalog` from now on. Requests under way finish where they are."""
        self.brain.apply_catalog(catalog)
        self._streams.sync()
        digests = {record.bundle_digest for record in self.brain.registry.endpoints.values()}
        self.bundles.forget_all_but(digests, {model.chat_template for model in catalog.models})

    def control_tokens(self) -> tuple[str, ...] | None:
        """Who may use the control port's guarded routes; `None`: loopback peers."""
        fixed = (self.config.control_token,) if self.config.control_token else ()
        if self.discovery is not None:
            return (*fixed, *self.discovery.control_tokens)
        return fixed or None

    async def close(self) -> None:
        if self.discovery is not None:
            await self.discovery.close()
        self._keep_alive.close()
        await self._streams.close()
        await self.session.close()
        await self.sharing.close()
        await self.tracing.close()
        self.preparation.close()
        await self.bundles.close()


def _credentials(config: GatewayConfig) -> Credentials:
    try:
        return load_credentials(config.kubernetes)
    except CredentialsError as error:
        raise SettingsError(f"discovery: the API server cannot be asked: {error}") from error
