"""The operator as a whole: who is who, what starts when, and how it ends.

Every replica watches and keeps its caches warm; only the leader runs what writes (keys, workers) and what only a writer
needs (load streams). A leader that loses its Lease ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
from collections.abc import Callable
from datetime import UTC, datetime

import kopf
from kubernetes.aio.client import Configuration

from pagemill_operator.autoscaler.records import encode_record
from pagemill_operator.backends.kubernetes.backend import KubernetesCluster
from pagemill_operator.backends.kubernetes.client import ApiError, Client, Unreachable
from pagemill_operator.backends.kubernetes.kinds import LLM_DEPLOYMENT, SECRET, WATCHED_KINDS, Kind
from pagemill_operator.backends.kubernetes.snapshot import Manifest, Owner, RenderContext
from pagemill_operator.backends.scaler import Scaler
from pagemill_operator.config import OperatorConfig
from pagemill_operator.controller import health
from pagemill_operator.controller.cache import Cache
from pagemill_operator.controller.chores import insist, repeat
from pagemill_operator.controller.cold_starts import ColdStarts
from pagemill_operator.controller.decision_records import DecisionRecords
from pagemill_operator.controller.events import EventRecorder
from pagemill_operator.controller.keys import KeyRing
from pagemill_operator.controller.lease import LeaderElection, Leadership, LeaseSettings
from pagemill_operator.controller.lease_store import KubernetesLease
from pagemill_operator.controller.load_stream import LoadStreams, display_wait_s
from pagemill_operator.controller.metrics import OperatorMetrics
from pagemill_operator.controller.pod_monitors import PodMonitors
from pagemill_operator.controller.queue import WorkQueue
from pagemill_operator.controller.reconcile import Reconciler
from pagemill_operator.controller.scaling import Autoscaling
from pagemill_operator.controller.session import watch_session
from pagemill_operator.controller.standby import Standby
from pagemill_operator.controller.watches import Watches
from pagemill_operator.controller.workers import Workers
from pagemill_operator.handlers import build_registry, build_settings, watch
from pagemill_operator.load.store import LoadStore
from pagemill_protocol.engine_token import GATEWAY_CONTROL

logger = logging.getLogger("pagemill.operator")

POLL_S = 1.0
"""Between looks at something that is waited for at start."""
KEYS_INTERVAL_S = 30.0
"""Between looks at the keys: without them a gateway that starts cannot serve."""
LOST_EXIT_CODE = 2
"""Of a process that lost its leadership."""


def exit_at_once() -> None:
    """Nothing may be written any more, not even by what is on its way: no orderly end."""
    logging.shutdown()
    os._exit(LOST_EXIT_CODE)


class Operator:
    def __init__(
        self,
        config: OperatorConfig,
        configuration: Configuration,
        identity: str,
        *,
        on_lost: Callable[[], None] = exit_at_once,
    ) -> None:
        self._config = config
        self._configuration = configuration
        self._on_lost = on_lost
        self._stopping = asyncio.Event()
        self._works = False
        """Leads, and has what it needs to work: until then nobody's turn comes."""
        self.metrics = OperatorMetrics()
        self.leadership = Leadership(config.renew_deadline_s)
        self.client = Client(configuration, remaining_s=self.leadership.remaining_s, on_response=self.metrics.responded)
        self.cache = Cache(config.namespace, config.gateway_selector, config.watch_namespaces)
        self.queue = WorkQueue(observer=self.metrics)
        self.watches = Watches(WATCHED_KINDS, self._namespaces, on_listed=self._listed)
        self.keys = KeyRing(
            self.client, config.namespace, config.keys_secret, config.key_rotation_s, on_change=self._wake_all
        )
        self.pod_monitors = PodMonitors(self.client, self.cache, self._namespaces, self._wake)
        self.loads = LoadStore()
        self.scaler = Scaler()
        self.streams = LoadStreams(
            self.loads,
            gateways=self.cache.gateways,
            token=self._gateway_token,
            port=config.gateway_control_port,
            on_change=self._load_changed,
        )
        self.cluster = KubernetesCluster(
            self.client,
            self.cache,
            self._render_context,
            load=self.loads.measured,
            scaling=self.scaler.state,
            held=self.loads.held,
            asleep=self.loads.asleep,
            on_write=self.metrics.wrote,
        )
        recorder = EventRecorder(self.client, identity)
        self.records = DecisionRecords(self.client, self.cache.owner, on_write=self.metrics.wrote)
        self.standby = Standby(
            self.client,
            self.cache,
            self.loads,
            token=self._engine_token,
            port=config.engine_control_port,
            on_write=self.metrics.wrote,
        )
        self.autoscaling = Autoscaling(
            self.scaler,
            self.loads,
            self.cache,
            self.cluster,
            recorder,
            self.records,
            self.metrics,
            self.standby,
            wake=self._wake,
        )
        reconciler = Reconciler(
            self.cache,
            self.cluster,
            self.client,
            recorder,
            self.metrics,
            url=config.gateway_url,
            scaled=self.autoscaling.scaled,
            starts=ColdStarts(self.loads.starts, self.metrics),
        )
        self.workers = Workers(self.queue, reconciler, self.metrics, count=config.workers, resync_s=config.resync_s)
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
        """Of metrics and health, once it runs."""

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises what made a part of it fail."""
        config = self._config
        runner, self.port = await health.serve(
            self.health, self.metrics, config.host, config.metrics_port, decisions=self._decisions
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
            # First nobody writes, then the Lease is given back, then the watches end.
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
        """kopf looks for the kind once, when it starts."""
        self.health.starting = f"the definition of {LLM_DEPLOYMENT.name} is not installed"
        path = f"/apis/{LLM_DEPLOYMENT.group}/{LLM_DEPLOYMENT.version}"
        is_told = False
        while True:
            try:
                await self.client.get(path)
                return
            except (ApiError, Unreachable) as error:
                if not is_told:
                    logger.warning("waiting for %s: %s; install the chart's definitions", path, error)
                    is_told = True
            await asyncio.sleep(POLL_S)

    async def _watch(self, stop: asyncio.Event) -> None:
        registry = build_registry(self._saw, self._login)
        # kopf takes the signals: it would end its watches first and leave the Lease to run out.
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
        work = asyncio.create_task(self._work(), name="work")
        try:
            holding = asyncio.create_task(self.election.hold(self._leadership_changed), name="lease")
            await asyncio.wait([holding, work], return_when=asyncio.FIRST_COMPLETED)
            if holding.done():
                logger.error("this process leads no longer and ends: %s", holding.result())
                self._on_lost()
                return
            await work
        finally:
            self.metrics.leads(False)
            for task in (work, holding):
                task.cancel()
            await asyncio.gather(work, holding, return_exceptions=True)

    async def _work(self) -> None:
        chores = {"keys": self._tend_keys, "kinds": self._look_for_pod_monitors}
        retry_s = self._config.retry_period_s
        due_s = {name: await insist(name, chore, retry_s) for name, chore in chores.items()}
        self._works = True
        self._wake_all()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.workers.run(), name="workers")
            group.create_task(self.streams.run(), name="load streams")
            group.create_task(self.autoscaling.run(), name="autoscaling")
            group.create_task(self.records.run(), name="decision records")
            group.create_task(self.standby.run(), name="standby")
            for name, chore in chores.items():
                at_once = self.keys.lost if name == "keys" else None
                group.create_task(repeat(name, chore, retry_s, due_s[name], at_once), name=name)

    async def _tend_keys(self) -> float:
        return min(KEYS_INTERVAL_S, await self.keys.tend())

    async def _look_for_pod_monitors(self) -> float:
        await self.pod_monitors.look()
        return self._config.resync_s * random.uniform(0.9, 1.1)

    # What comes in

    def _saw(self, kind: Kind, event_type: str | None, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        identity = (metadata["namespace"], metadata["name"])
        if event_type == "DELETED":
            changed = self.cache.remove(kind.name, *identity, metadata["uid"])
        else:
            changed = self.cache.put(kind.name, manifest)
        if kind == SECRET:
            self.keys.saw(event_type, manifest)
        self.watches.handled(kind.name, identity)
        self._wake(changed)

    def _listed(self, kind: str, namespace: str, identities: set[tuple[str, str]]) -> None:
        self._wake(self.cache.listed(kind, namespace, identities))

    def _load_changed(self, keys: set[str]) -> None:
        self.autoscaling.heard(keys)
        now = datetime.now(UTC)
        for key in keys:
            if owner := self.cache.owner(key):
                self.queue.add(key, display_wait_s(owner.get("status") or {}, now))

    def _leadership_changed(self, leads: bool) -> None:
        self.metrics.leads(leads)
        if leads:
            self._wake_all()

    def _wake(self, keys: set[str]) -> None:
        for key in keys if self._works else ():
            self.queue.add(key)

    def _wake_all(self) -> None:
        self._wake(set(self.cache.keys()))

    # What others ask

    @property
    def _namespaces(self) -> list[str]:
        """Watched namespaces, that of the release among them; empty: all."""
        wanted = self._config.watch_namespaces
        return sorted({*wanted, self._config.namespace}) if wanted else []

    def _login(self) -> kopf.AiohttpSession:
        session = watch_session(self._configuration, self.watches, self.metrics.responded)
        return kopf.AiohttpSession(server=self._configuration.host, aiohttp_session=session)

    def _decisions(self, key: str) -> bytes:
        records = self.scaler.records([key] if key else [])
        return b"".join(encode_record(record) + b"\n" for record in records)

    def _gateway_token(self) -> str | None:
        return self.keys.keys.keys.sent(*GATEWAY_CONTROL) if self.keys.keys else None

    def _engine_token(self, namespace: str, name: str) -> str | None:
        return self.keys.keys.keys.sent(namespace, name) if self.keys.keys else None

    def _render_context(self, owner: Owner, loader_done: bool) -> RenderContext:
        if self.keys.keys is None:
            raise Unreachable("the keys for engine tokens are not known yet")
        config = self._config
        return RenderContext(
            namespace=config.namespace,
            engine_image=config.engine_image,
            image_pull_policy=config.image_pull_policy,
            image_pull_secrets=tuple(config.image_pull_secrets),
            gateway_selector=config.gateway_selector,
            operator_selector=config.operator_selector,
            prometheus_namespace_selector=config.prometheus_namespace_selector,
            prometheus_pod_selector=config.prometheus_pod_selector,
            tokens=self.keys.keys.keys.accepted(owner.namespace, owner.name),
            has_pod_monitors=self.pod_monitors.exist,
            loader_done=loader_done,
        )
