"""The leader's autoscaling: asks the scaler about each deployment, periodically and when a request waits for an engine.

It writes nothing: a changed number wakes the deployment's key, and the next reconcile carries it out. `load.store` has
the signals, `autoscaler` decides, `reconcile` gets the plan to carry out from `scaled`, and `standby` wakes replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from pagemill_operator.autoscaler.records import Record, log_line
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.backends.kubernetes.backend import KubernetesCluster
from pagemill_operator.backends.kubernetes.render.names import AWAKE_ANNOTATION, workload_at
from pagemill_operator.backends.scaler import Scaler
from pagemill_operator.controller.reporting.events import EventRecorder
from pagemill_operator.controller.reporting.metrics import OperatorMetrics
from pagemill_operator.controller.scaling.decision_records import DecisionRecords
from pagemill_operator.controller.scaling.standby import Standby
from pagemill_operator.controller.watching.cache import ObjectCache
from pagemill_operator.load.decisions import DecisionHistory
from pagemill_operator.load.store import LoadStore
from pagemill_operator.plan.types import Plan

logger = logging.getLogger("pagemill.operator.scaling")

INTERVAL_S = 2.0


class AutoscalingLoop:
    def __init__(
        self,
        scaler: Scaler,
        loads: LoadStore,
        cache: ObjectCache,
        cluster: KubernetesCluster,
        recorder: EventRecorder,
        records: DecisionRecords,
        history: DecisionHistory,
        metrics: OperatorMetrics,
        standby: Standby,
        *,
        wake: Callable[[set[str]], None],
    ) -> None:
        """`wake` is called with the keys whose number of replicas has changed."""
        self._scaler = scaler
        self._loads = loads
        self._cache = cache
        self._cluster = cluster
        self._recorder = recorder
        self._records = records
        self._history = history
        self._metrics = metrics
        self._standby = standby
        self._wake = wake
        self._urgent = asyncio.Event()

    async def run(self) -> None:
        """Decide periodically until cancelled."""
        while True:
            self._urgent.clear()
            keys = [key for key in self._cache.keys() if self._settings(key)]  # noqa: SIM118
            for gone in self._scaler.keep(keys):
                self._metrics.not_scaled(gone)
                self._records.forget(gone)
            for key in keys:
                try:
                    await self.look(key)
                except Exception:
                    # An error of one deployment must not stop the others; its replicas stay as they are.
                    logger.exception("the autoscaler could not decide on %s", key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._urgent.wait()

    def load_changed(self, keys: set[str]) -> None:
        """React to a changed load: decide at once if a request waits for an engine."""
        if any(self._loads.needs_engine(key) for key in keys):
            self._urgent.set()

    def scaled(self, plan: Plan) -> Plan:
        """Return the plan with the autoscaler's number of replicas."""
        return plan.with_replicas(self._scaler.wanted(plan.key, self._start(plan), plan.autoscaling))

    async def look(self, key: str) -> None:
        """Decide on one deployment and pass the decision on."""
        plan = self._cluster.plan(key)
        if plan is None or plan.autoscaling is None or self._cache.owner(key) is None:
            return
        seen = self._cluster.observe(key)
        if not seen.is_in_effect:
            return
        record = self._scaler.decide(
            key,
            plan.autoscaling,
            seen,
            self._loads.reports(key),
            start=self._start(plan),
            num_gateways=self._cache.num_gateways_ready(),
        )
        # This comes before any write: a request may be waiting for a sleeping replica.
        self._standby.look(key, self.scaled(plan), seen)
        if record is not None:
            await self._publish(record)

    def _settings(self, key: str) -> ScalingSettings | None:
        plan = self._cluster.plan(key)
        return plan.autoscaling if plan is not None else None

    async def _publish(self, record: Record) -> None:
        decision = record.decision
        logger.info("%s", log_line(record))
        self._records.note(record)
        self._history.note(record)
        self._metrics.scaled(record.key, decision.replicas)
        owner = self._cache.owner(record.key)
        if owner is not None and decision.changes and record.settings.mode == "Advisory":
            message = (
                f"recommends {decision.replicas} replicas instead of {decision.replicas_before}: {decision.message}"
            )
            await self._recorder.record(owner, "Normal", "ScalingAdvised", message)
        self._wake({record.key})

    def _start(self, plan: Plan) -> int:
        """Return the replicas that the cluster was last set to, also by an earlier leader; for a new deployment the
        spec's.
        """
        if plan.autoscaling is None or plan.autoscaling.mode != "Active":
            return plan.spec_replicas
        deployment = self._cache.children(plan.key).get(workload_at(plan))
        if deployment is None:
            return plan.spec_replicas
        awake = (deployment["metadata"].get("annotations") or {}).get(AWAKE_ANNOTATION, "")
        return int(awake) if awake.isdecimal() else int(deployment["spec"].get("replicas", 1))
