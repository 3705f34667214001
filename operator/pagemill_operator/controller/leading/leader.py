"""The leading operator's work: keys, reconciles, load streams, autoscaling, and the records of decisions.

Every replica builds these parts, and its watches keep the caches warm; only the leader calls `run`. `operator` watches
and leads, `workers` reconcile, `scaling` decides on replicas.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from datetime import UTC, datetime

from pagemill_kube.client import Client
from pagemill_kube.errors import Unreachable
from pagemill_operator.autoscaler.records import encode_record
from pagemill_operator.backends.kubernetes.backend import KubernetesCluster
from pagemill_operator.backends.kubernetes.snapshot import Owner, RenderContext
from pagemill_operator.backends.scaler import Scaler
from pagemill_operator.config import OperatorConfig
from pagemill_operator.controller.leading.keys import ClusterKeys
from pagemill_operator.controller.leading.queue import WorkQueue
from pagemill_operator.controller.leading.reconcile import Reconciler
from pagemill_operator.controller.leading.workers import Workers
from pagemill_operator.controller.reporting.adapter_statuses import AdapterStatuses
from pagemill_operator.controller.reporting.cold_starts import ColdStarts
from pagemill_operator.controller.reporting.events import EventRecorder
from pagemill_operator.controller.reporting.metrics import OperatorMetrics
from pagemill_operator.controller.scaling.decision_records import DecisionRecords
from pagemill_operator.controller.scaling.scaling import AutoscalingLoop
from pagemill_operator.controller.scaling.standby import Standby
from pagemill_operator.controller.watching.cache import ObjectCache
from pagemill_operator.controller.watching.load_progress import LoaderProgress
from pagemill_operator.controller.watching.load_stream import LoadStreams, display_wait_s
from pagemill_operator.controller.watching.periodic import PodMonitors, repeat, retry
from pagemill_operator.load.decisions import DecisionHistory
from pagemill_operator.load.store import LoadStore
from pagemill_protocol.engine_token import GATEWAY_CONTROL

KEYS_INTERVAL_S = 30.0
"""Seconds between reads of the keys: without them a gateway that starts cannot serve."""


class Leader:
    def __init__(
        self,
        config: OperatorConfig,
        identity: str,
        client: Client,
        cache: ObjectCache,
        queue: WorkQueue,
        metrics: OperatorMetrics,
        namespaces: Sequence[str],
    ) -> None:
        """`namespaces` are the watched ones; empty means all."""
        self._config = config
        self._client = client
        self._cache = cache
        self._queue = queue
        self._metrics = metrics
        self._recorder = EventRecorder(client, identity)
        self._is_working = False
        """Whether this process leads and has its keys; until then no deployment is queued."""
        self.keys = ClusterKeys(
            client, config.namespace, config.keys_secret, config.key_rotation_s, on_change=self.wake_all
        )
        self.loads = LoadStore()
        self.progress = LoaderProgress(client)
        self.scaler = Scaler()
        self._history = DecisionHistory()
        self._starts = ColdStarts(self.loads.starts, metrics)
        self.adapter_statuses = AdapterStatuses(client, cache, self.loads.held, on_write=metrics.wrote)
        self._pod_monitors = PodMonitors(client, cache, namespaces, self.wake)
        self._records = DecisionRecords(client, cache.owner, on_write=metrics.wrote)
        self._cluster = self._make_cluster()
        self._standby = self._make_standby()
        self._streams = self._make_streams()
        self.autoscaling = self._make_autoscaling()
        self.workers = self._make_workers()

    async def run(self) -> None:
        """Work until cancelled, or until this process may not write any more."""
        tasks = {"keys": self._rotate_keys, "kinds": self._refresh_pod_monitors}
        retry_s = self._config.retry_period_s
        due_s = {name: await retry(name, task, retry_s) for name, task in tasks.items()}
        self._starts.begin()
        self._is_working = True
        self.wake_all()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.workers.run(), name="workers")
            group.create_task(self._streams.run(), name="load streams")
            group.create_task(self.autoscaling.run(), name="autoscaling")
            group.create_task(self._records.run(), name="decision records")
            group.create_task(self._standby.run(), name="standby")
            group.create_task(self.adapter_statuses.run(), name="adapter statuses")
            for name, task in tasks.items():
                at_once = self.keys.missing if name == "keys" else None
                group.create_task(repeat(name, task, retry_s, due_s[name], at_once), name=name)

    def wake(self, keys: set[str]) -> None:
        """Queue these deployments, because something about them has changed."""
        self.adapter_statuses.changed()
        for key in keys if self._is_working else ():
            self._queue.add(key)

    def wake_all(self) -> None:
        self.wake(set(self._cache.keys()))

    def decisions(self, key: str) -> bytes:
        """Return the records of a deployment, or of all for an empty key, as one line of JSON each."""
        records = self.scaler.records([key] if key else [])
        return b"".join(encode_record(record) + b"\n" for record in records)

    async def _rotate_keys(self) -> float:
        return min(KEYS_INTERVAL_S, await self.keys.rotate())

    async def _refresh_pod_monitors(self) -> float:
        await self._pod_monitors.refresh()
        return self._config.resync_s * random.uniform(0.9, 1.1)

    def _load_changed(self, keys: set[str]) -> None:
        self.autoscaling.load_changed(keys)
        self.adapter_statuses.changed()
        now = datetime.now(UTC)
        for key in keys:
            if owner := self._cache.owner(key):
                self._queue.add(key, display_wait_s(owner.get("status") or {}, now))

    # The parts

    def _make_cluster(self) -> KubernetesCluster:
        return KubernetesCluster(
            self._client,
            self._cache,
            self._render_context,
            load=self.loads.measured,
            scaling=self.scaler.state,
            held=self.loads.held,
            asleep=self.loads.asleep,
            unused_settings=self.loads.unused_settings,
            routing_policies=self.loads.routing_policies,
            progress=self.progress.text,
            on_write=self._metrics.wrote,
        )

    def _make_standby(self) -> Standby:
        return Standby(
            self._client,
            self._cache,
            self.loads,
            token=self._engine_token,
            port=self._config.engine_control_port,
            tls=self._config.engine_tls,
            on_write=self._metrics.wrote,
        )

    def _make_streams(self) -> LoadStreams:
        return LoadStreams(
            self.loads,
            self._history,
            gateways=self._cache.gateways,
            token=self._gateway_token,
            port=self._config.gateway_control_port,
            on_change=self._load_changed,
        )

    def _make_autoscaling(self) -> AutoscalingLoop:
        return AutoscalingLoop(
            self.scaler,
            self.loads,
            self._cache,
            self._cluster,
            self._recorder,
            self._records,
            self._history,
            self._metrics,
            self._standby,
            wake=self.wake,
        )

    def _make_workers(self) -> Workers:
        config = self._config
        reconciler = Reconciler(
            self._cache,
            self._cluster,
            self._client,
            self._recorder,
            self._metrics,
            url=config.gateway_url,
            scaled=self.autoscaling.scaled,
            starts=self._starts,
            progress=self.progress,
        )
        return Workers(self._queue, reconciler, self._metrics, count=config.workers, resync_s=config.resync_s)

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
            cpu_engine_image=config.cpu_engine_image,
            image_pull_policy=config.image_pull_policy,
            image_pull_secrets=tuple(config.image_pull_secrets),
            gateway_selector=config.gateway_selector,
            operator_selector=config.operator_selector,
            prometheus_namespace_selector=config.prometheus_namespace_selector,
            prometheus_pod_selector=config.prometheus_pod_selector,
            engine_ids=config.engine_ids,
            engine_extra_egress=tuple(config.engine_extra_egress),
            engine_tls_secret=config.engine_tls.secret,
            engine_tls_name=config.engine_tls.server_name,
            tokens=self.keys.keys.keys.accepted(owner.namespace, owner.name),
            has_pod_monitors=self._pod_monitors.exist,
            prefers_ipv6=self._client.is_ipv6,
            loader_done=loader_done,
        )
