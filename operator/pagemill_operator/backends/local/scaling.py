"""Autoscaling on this machine: follows the gateway's load stream and asks the scaler, as the operator does in a
cluster.

It starts and drains nothing: the backend reads `wanted` when it reconciles, and is woken when that has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping

import aiohttp

from pagemill_operator.autoscaler.records import Record, log_line
from pagemill_operator.backends.scaler import Scaler
from pagemill_operator.load.decisions import DecisionHistory, publishing
from pagemill_operator.load.store import LoadStore
from pagemill_operator.load.stream import STREAM_FAULTS, follow_load
from pagemill_operator.plan.types import Plan
from pagemill_operator.status.observation import Observation, ScalingState
from pagemill_protocol.report.load import DeploymentLoad, EngineReport, LoadFrame

logger = logging.getLogger("pagemill.operator.scaling")

INTERVAL_S = 1.0
REFRESH_S = 5.0
"""How often the latest decisions are stored, also those that change nothing, so that their inputs are current."""
RETRY_S = 0.2
GATEWAY = "gateway"


class LocalScaling:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        control_url: Callable[[], str | None],
        token: str,
        observed: Callable[[], Mapping[str, Observation]],
        on_decision: Callable[[Record], None],
        on_unused: Callable[[str], None],
        on_refresh: Callable[[], None],
    ) -> None:
        """Create the autoscaling; `observed` returns the observations by key.

        `on_decision` is called for decisions that change something or have a new reason not to, `on_unused` with the
        key of a deployment whose engines report other settings without effect than before, or none for the first time,
        `on_refresh` every `REFRESH_S`.
        """
        self._session = session
        self._control_url = control_url
        self._token = token
        self._observed = observed
        self._on_decision = on_decision
        self._on_unused = on_unused
        self._on_refresh = on_refresh
        self._scaler = Scaler()
        self._loads = LoadStore()
        self._history = DecisionHistory()
        self._urgent = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._follow(), name="load stream"),
            asyncio.create_task(self._keep_deciding(), name="autoscaling"),
        ]

    def wanted(self, plan: Plan) -> int:
        return self._scaler.wanted(plan.key, plan.spec_replicas, plan.autoscaling)

    def held(self, key: str) -> dict[str, EngineReport]:
        """Return the load of each engine by endpoint, as far as the gateway reports it."""
        return self._loads.held(key)

    def unused_settings(self, key: str) -> frozenset[str] | None:
        return self._loads.unused_settings(key)

    def routing_policies(self, key: str) -> tuple[str, ...]:
        return self._loads.routing_policies(key)

    def load(self) -> list[DeploymentLoad]:
        """Return the load of all deployments, as the gateway reported it last; empty while it does not."""
        return self._loads.latest(GATEWAY)

    def is_capped(self, key: str) -> bool:
        """Whether a deployment has its maximum of replicas and needs more."""
        decision = self._scaler.decision(key)
        return decision is not None and decision.reason in ("AtMaximum", "Saturated")

    def state(self, key: str) -> ScalingState | None:
        return self._scaler.state(key)

    def records(self) -> list[Record]:
        """Return the latest decisions on all deployments, oldest first."""
        return self._scaler.records()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            if url := self._control_url():
                try:
                    async with publishing(self._session, url, self._token, self._history):
                        await follow_load(self._session, url, self._token, self._report)
                except STREAM_FAULTS as error:
                    logger.debug("the gateway's load stream is interrupted: %s", str(error) or type(error).__name__)
                finally:
                    self._loads.remove(GATEWAY)
            await asyncio.sleep(RETRY_S)

    def _report(self, frame: LoadFrame) -> None:
        before = {load.key: self._without_effect(load.key) for load in frame.deployments}
        changed = self._loads.put(GATEWAY, frame)
        for key in changed:
            if self._without_effect(key) != before[key]:
                self._on_unused(key)
        if any(self._loads.needs_engine(key) for key in changed):
            self._urgent.set()

    def _without_effect(self, key: str) -> tuple[object, ...]:
        return self._loads.unused_settings(key), self._loads.routing_policies(key)

    async def _keep_deciding(self) -> None:
        refreshed_at = -REFRESH_S
        while True:
            self._urgent.clear()
            try:
                self._decide()
                if time.monotonic() - refreshed_at >= REFRESH_S:
                    self._on_refresh()
                    refreshed_at = time.monotonic()
            except Exception:
                logger.exception("the autoscaler could not decide; the number of replicas stays as it is")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._urgent.wait()

    def _decide(self) -> None:
        observed = self._observed()
        self._scaler.keep(key for key, seen in observed.items() if seen.plan is not None and seen.plan.autoscaling)
        for key, seen in observed.items():
            plan = seen.plan
            if plan is None or plan.autoscaling is None or not seen.is_in_effect:
                continue
            reports = self._loads.reports(key)
            record = self._scaler.decide(
                key, plan.autoscaling, seen, reports, start=plan.spec_replicas, num_gateways=int(seen.gateway_ready)
            )
            if record is not None:
                logger.info("%s", log_line(record))
                self._history.note(record)
                self._on_decision(record)
