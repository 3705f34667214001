"""One operator process: it watches, competes for the Lease, works while it leads, and ends.

Every replica watches and keeps its caches warm; only the leader writes. A leader that loses its Lease exits at once.
`leader` is the leading process's work; `handlers` connects kopf.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable

import kopf

from pagemill_kube.client import Client
from pagemill_kube.credentials import Credentials
from pagemill_kube.errors import ApiError, Unreachable
from pagemill_kube.kinds import Kind
from pagemill_operator.backends.kubernetes.kinds import LLM_DEPLOYMENT, LORA_ADAPTER, SECRET, WATCHED_KINDS
from pagemill_operator.backends.kubernetes.snapshot import FIELD_MANAGER, Manifest
from pagemill_operator.config import OperatorConfig
from pagemill_operator.controller.leading.leader import Leader
from pagemill_operator.controller.leading.lease import KubernetesLease, LeaderElection, Leadership, LeaseSettings
from pagemill_operator.controller.leading.queue import WorkQueue
from pagemill_operator.controller.reporting import health
from pagemill_operator.controller.reporting.metrics import OperatorMetrics
from pagemill_operator.controller.watching.cache import ObjectCache
from pagemill_operator.controller.watching.session import watch_session
from pagemill_operator.controller.watching.watches import Watches
from pagemill_operator.handlers import build_registry, build_settings, watch

logger = logging.getLogger("pagemill.operator")

POLL_S = 1.0
"""Seconds between two checks of something that the operator waits for at its start."""
LOST_EXIT_CODE = 2
"""The exit code of a process that lost its leadership."""


def exit_at_once() -> None:
    """Exit without an orderly end: nothing may be written any more, not even by requests in flight."""
    logging.shutdown()
    os._exit(LOST_EXIT_CODE)


class Operator:
    def __init__(
        self,
        config: OperatorConfig,
        credentials: Credentials,
        identity: str,
        *,
        on_lost: Callable[[], None] = exit_at_once,
    ) -> None:
        self._config = config
        self._credentials = credentials
        self._on_lost = on_lost
        self._stopping = asyncio.Event()
        self.metrics = OperatorMetrics()
        self.leadership = Leadership(config.renew_deadline_s)
        self.client = Client(
            credentials,
            field_manager=FIELD_MANAGER,
            remaining_s=self.leadership.remaining_s,
            on_response=self.metrics.responded,
        )
        self.cache = ObjectCache(config.namespace, config.gateway_selector, config.watch_namespaces)
        self.queue = WorkQueue(observer=self.metrics)
        self.watches = Watches(WATCHED_KINDS, self._namespaces, on_listed=self._listed)
        self.leader = Leader(config, identity, self.client, self.cache, self.queue, self.metrics, self._namespaces)
        self.election = LeaderElection(
            LeaseSettings(identity, config.lease_duration_s, config.renew_deadline_s, config.retry_period_s),
            KubernetesLease(self.client, config.namespace, config.lease_name),
            self.leadership,
        )
        self.health = health.Health(
            stalled_watch_s=self.watches.stalled_s,
            longest_reconcile_s=self.queue.longest_running_s,
            unsynced=self.watches.unsynced,
        )
        self.metrics.watch(
            depth=lambda: len(self.queue),
            deployments=lambda: self.cache.count(LLM_DEPLOYMENT.name),
            watch_age_s=self.watches.age_s,
            kinds=[kind.name for kind in WATCHED_KINDS],
        )
        self.port = 0
        """The port of metrics and health, once the server runs."""

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT. Raise the error of a part that failed."""
        config = self._config
        runner, self.port = await health.serve(
            self.health, self.metrics, config.host, config.metrics_port, decisions=self.leader.decisions
        )
        try:
            await self._run_parts()
        finally:
            await runner.cleanup()
            await self.client.close()

    def stop(self) -> None:
        self._stopping.set()

    async def _run_parts(self) -> None:
        self._handle_signals()
        parts = [
            asyncio.create_task(self.health.measure_lag(self.metrics.lagged), name="loop lag"),
            asyncio.create_task(self._watch_and_lead(), name="operator"),
        ]
        stopping = asyncio.create_task(self._stopping.wait(), name="stop")
        try:
            await asyncio.wait([*parts, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*parts, stopping):
                task.cancel()
            results = await asyncio.gather(*parts, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _watch_and_lead(self) -> None:
        await self._wait_for_definition()
        self.health.starting = ""
        kopf_stop = asyncio.Event()
        watching = asyncio.create_task(self._watch(kopf_stop), name="kopf")
        leading = asyncio.create_task(self._lead(), name="leader")
        try:
            await asyncio.wait([watching, leading], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # First the writes end, then the Lease is released, then the watches end.
            leading.cancel()
            results = [*await asyncio.gather(leading, return_exceptions=True)]
            await self.election.release()
            kopf_stop.set()
            results += await asyncio.gather(watching, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        if not self._stopping.is_set():
            raise RuntimeError("the watches have ended")

    async def _wait_for_definition(self) -> None:
        """Wait until the CRDs are installed: kopf looks for the kinds only once, when it starts."""
        self.health.starting = f"the CustomResourceDefinition of {LLM_DEPLOYMENT.name} is not installed"
        path = f"/apis/{LLM_DEPLOYMENT.group}/{LLM_DEPLOYMENT.version}"
        is_logged = False
        while True:
            try:
                installed = {each["name"] for each in (await self.client.get(path)).get("resources", [])}
                missing = [kind for kind in (LLM_DEPLOYMENT, LORA_ADAPTER) if kind.plural not in installed]
                if not missing:
                    return
                self.health.starting = f"the CustomResourceDefinition of {missing[0].name} is not installed"
                raise Unreachable(f"{missing[0].name} is not served")
            except (ApiError, Unreachable) as error:
                if not is_logged:
                    logger.warning(
                        "waiting for %s: %s; install the CustomResourceDefinitions of the Helm chart", path, error
                    )
                    is_logged = True
            await asyncio.sleep(POLL_S)

    async def _watch(self, stop: asyncio.Event) -> None:
        registry = build_registry(self._observe, self._login)
        # The operator handles signals itself: kopf would end its watches first and leave the Lease to expire.
        await watch(registry, build_settings(self._config), self._namespaces, stop, self._handle_signals)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.add_signal_handler(number, self.stop)

    async def _lead(self) -> None:
        await self.watches.wait_synced()
        logger.info("caches are filled: %d deployments", self.cache.count(LLM_DEPLOYMENT.name))
        await self.election.acquire()
        self.metrics.leads(True)
        work = asyncio.create_task(self.leader.run(), name="work")
        try:
            holding = asyncio.create_task(self.election.hold(self._leadership_changed), name="lease")
            await asyncio.wait([holding, work], return_when=asyncio.FIRST_COMPLETED)
            if holding.done():
                logger.error("this process is not the leader any more and exits: %s", holding.result())
                self._on_lost()
                return
            await work
        finally:
            self.metrics.leads(False)
            for task in (work, holding):
                task.cancel()
            await asyncio.gather(work, holding, return_exceptions=True)

    # Input

    def _observe(self, kind: Kind, event_type: str | None, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        identity = (metadata["namespace"], metadata["name"])
        if event_type == "DELETED":
            changed = self.cache.remove(kind.name, *identity, metadata["uid"])
        else:
            changed = self.cache.put(kind.name, manifest)
        if kind == SECRET:
            self.leader.keys.observe(event_type, manifest)
        self.watches.handled(kind.name, identity)
        self.leader.wake(changed)

    def _listed(self, kind: str, namespace: str, identities: set[tuple[str, str]]) -> None:
        self.leader.wake(self.cache.listed(kind, namespace, identities))

    def _leadership_changed(self, leads: bool) -> None:
        self.metrics.leads(leads)
        if leads:
            self.leader.wake_all()

    @property
    def _namespaces(self) -> list[str]:
        """Return the watched namespaces with the release's among them; empty means all."""
        wanted = self._config.watch_namespaces
        return sorted({*wanted, self._config.namespace}) if wanted else []

    def _login(self) -> kopf.AiohttpSession:
        session = watch_session(self._credentials, self.watches, self.metrics.responded)
        return kopf.AiohttpSession(server=self._credentials.base_url, aiohttp_session=session)
