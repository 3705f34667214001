"""`LocalBackend`: carries plans out as processes on this machine.

One task reconciles: it compares what is wanted with what runs, starts and drains replicas, and sends the gateway its
endpoints. Every change wakes it; nothing else acts. `rollout` decides, `supervisor` runs processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from pagemill_operator.autoscaler.records import Record, encode_record
from pagemill_operator.backends.base import FORMER_NAME_S, Cluster, Event
from pagemill_operator.backends.deployment_metrics import DEPLOYMENT_METRICS, DeploymentMetrics
from pagemill_operator.backends.local.gateway import LocalGateway
from pagemill_operator.backends.local.load import MachineLoad, read_load
from pagemill_operator.backends.local.machine import least_used, threads_per_engine
from pagemill_operator.backends.local.ports import ensure_bindable, free_port
from pagemill_operator.backends.local.replicas import Deployment, Replica, SleepCalls, engine_launcher, unused_name
from pagemill_operator.backends.local.scaling import LocalScaling
from pagemill_operator.backends.local.settings import LocalSettings
from pagemill_operator.backends.local.state_dir import ScrapeTarget, StateDir
from pagemill_operator.backends.local.supervisor import Supervisor
from pagemill_operator.backends.rollout import Actions, next_actions
from pagemill_operator.backends.standby import next_standby_actions
from pagemill_operator.plan.planner import name_conflicts
from pagemill_operator.plan.types import Plan
from pagemill_operator.plan.unused import unused_fields
from pagemill_operator.status.conditions import Observation
from pagemill_operator.status.observation import ReplicaObservation
from pagemill_protocol.catalog import Catalog
from pagemill_protocol.metrics import Metrics, Scrape
from pagemill_protocol.report.adapters import ModelNames, WantedAdapters
from pagemill_protocol.report.histogram import merged
from pagemill_protocol.report.load import EngineReport

logger = logging.getLogger("pagemill.operator.local")

LOOPBACK = "127.0.0.1"
INFORM_TIMEOUT_S = 2.0
"""Seconds that a draining replica waits until the gateway knows; then it drains anyway."""
KILL_MARGIN_S = 5.0
"""Seconds that a process has to end after its drain time."""


class LocalBackend(Cluster):
    """Runs plans as local processes. `start` it, set the wanted deployments with `apply`, and end it with `stop`."""

    def __init__(
        self,
        settings: LocalSettings,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._on_event = on_event
        self._on_change = on_change
        self._deployments: dict[str, Deployment] = {}
        self._wake = asyncio.Event()
        self._stopped = False
        self._metrics = DeploymentMetrics(Metrics(DEPLOYMENT_METRICS))
        self._own_metrics = OwnMetrics(self.scrape)
        self._targets: list[ScrapeTarget] | None = None
        """The targets that were written last."""
        self._state_dir: StateDir
        self._session: aiohttp.ClientSession
        self._reconciler: asyncio.Task[None] | None = None
        self.gateway: LocalGateway
        self._scaling: LocalScaling
        self._sleep_calls: SleepCalls
        self._started_s = 0.0

    @property
    def base_url(self) -> str:
        """URL of the gateway's data port, without `/v1`."""
        return self.gateway.base_url

    @property
    def folder(self) -> Path:
        """The private folder; it is removed when the backend stops."""
        return self._state_dir.path

    def scrape(self, accept: str) -> Scrape:
        """Return the current metrics of all deployments, as an operator exports them."""
        for key in self._deployments:
            self._metrics.observed(self.observe(key))
        return self._metrics.scrape(accept)

    async def start(self) -> None:
        """Start the gateway. Raise `PortInUse` or `BackendError` before anything runs."""
        settings = self._settings
        self._started_s = time.monotonic()
        ensure_bindable(settings.host, settings.port)
        self._state_dir = StateDir(settings.runtime_folder, settings.logs_folder)
        # No proxy is used: everything is on this machine.
        self._session = aiohttp.ClientSession(trust_env=False)
        self.gateway = LocalGateway(
            settings.port or free_port(settings.host),
            settings=settings,
            state_dir=self._state_dir,
            session=self._session,
            on_change=self._changed,
            on_event=self._on_event,
        )
        self._sleep_calls = SleepCalls(self._session, self._changed)
        await self._own_metrics.start()
        self.gateway.supervisor.start()
        self._reconciler = asyncio.create_task(self._keep_reconciling(), name="reconcile")
        self._scaling = LocalScaling(
            self._session,
            control_url=lambda: self.gateway.control_url if self.gateway.ready else None,
            token=self.gateway.token,
            observed=lambda: {key: self.observe(key) for key, each in self._deployments.items() if each.wanted},
            on_decision=self._decided,
            on_unused=self._found_unused,
            on_refresh=self._write_records,
        )

    async def apply(self, plans: Sequence[Plan]) -> None:
        """Want these deployments as planned, new ones oldest first; others stay as they are."""
        for plan in plans:
            deployment = self._deployments.setdefault(plan.key, Deployment(plan))
            if deployment.want(plan, time.monotonic()):
                asyncio.get_running_loop().call_later(FORMER_NAME_S, self._wake.set)
        self._resolve_conflicts()

    async def forget(self, keys: Collection[str]) -> None:
        """Drain these deployments and forget them."""
        for key in keys:
            self._deployments[key].wanted = False
        self._resolve_conflicts()

    def observe(self, key: str) -> Observation:
        deployment = self._deployments[key]
        return Observation(
            plan=self._plan(deployment),
            replicas=tuple(self._seen_by_gateway(replica) for replica in deployment.replicas),
            gateway_ready=self.gateway.ready,
            gateway_message=self.gateway.message,
            conflict=deployment.conflict,
            scaling=self._scaling.state(key) if deployment.plan.autoscaling else None,
            unused_settings=self._scaling.unused_settings(key),
            routing_policies=self._scaling.routing_policies(key),
        )

    def _seen_by_gateway(self, replica: Replica) -> ReplicaObservation:
        """Report a replica as ready only once the running gateway's catalogue has it and can send it requests."""
        seen, endpoint = replica.observation, replica.endpoint
        if seen.phase != "ready" or not self.gateway.ready or endpoint is None or self.gateway.has(endpoint):
            return seen
        return replace(seen, phase="starting")

    def supervisors(self, key: str) -> list[Supervisor]:
        """Return the supervisors of a deployment's replicas, oldest first."""
        return [replica.supervisor for replica in self._deployments[key].replicas]

    async def load(self) -> MachineLoad:
        """Return the load that gateway and engines report now."""
        gateway = self.gateway
        engines = [replica.supervisor.launch for replica in self._all_replicas()]
        urls = [launch.control_url for launch in engines if launch]
        if gateway.control_url is None:
            return MachineLoad()
        found = await read_load(self._session, gateway.control_url, gateway.token, urls)
        reported = self._scaling.load()
        ttft_ms = merged(each.latencies.ttft_ms for each in reported).quantile(0.95)
        return found._replace(num_queued=sum(each.queue.num_requests for each in reported), ttft_ms=ttft_ms)

    def is_capped(self, key: str) -> bool:
        """Whether a deployment has its maximum of replicas and needs more."""
        return self._scaling.is_capped(key)

    async def stop(self) -> None:
        """Stop the gateway first, so that no engine cuts a client off; then all engines; then remove the files."""
        if self._stopped or self._reconciler is None:
            return
        self._stopped = True
        await self._scaling.close()
        await self._sleep_calls.close()
        self._reconciler.cancel()
        await asyncio.gather(self._reconciler, return_exceptions=True)
        timeout_s = self._settings.stop_timeout_s
        try:
            await self.gateway.end(timeout_s)
            replicas = [replica for deployment in self._deployments.values() for replica in deployment.replicas]
            await asyncio.gather(*(self._end_now(replica, timeout_s) for replica in replicas))
        finally:
            await self._own_metrics.close()
            await self._session.close()
            self._state_dir.remove()

    def kill(self) -> None:
        """Kill all processes at once. Call it while `stop` is under way, which still removes the files."""
        if self._reconciler is None:
            return
        for supervisor in (self.gateway.supervisor, *(replica.supervisor for replica in self._all_replicas())):
            supervisor.kill()

    def _resolve_conflicts(self) -> None:
        """Find conflicting model names again and reconcile, after the wanted deployments have changed."""
        conflicts = name_conflicts([deployment.plan for deployment in self._deployments.values() if deployment.wanted])
        for key, deployment in self._deployments.items():
            deployment.conflict = conflicts.get(key)
        self._reconcile()

    def _plan(self, deployment: Deployment) -> Plan:
        """Return the plan with as many replicas as the autoscaler wants."""
        return deployment.plan.with_replicas(self._scaling.wanted(deployment.plan))

    def _decided(self, record: Record) -> None:
        decision, is_active = record.decision, record.settings.mode == "Active"
        self._metrics.scaled(record.key, decision.replicas)
        if decision.changes:
            action = "scaled to" if is_active else "would be scaled to"
            message = f"{action} {decision.replicas} replicas from {decision.replicas_before}: {decision.message}"
            self._on_event(Event(record.key.partition("/")[2], message, time.monotonic() - self._started_s))
        self._changed()
        self._write_records()

    def _write_records(self) -> None:
        try:
            self._state_dir.write_records(map(encode_record, self._scaling.records()))
        except OSError as error:
            logger.warning("the autoscaler's decisions could not be stored for `pagemill why`: %s", error)

    def _found_unused(self, key: str) -> None:
        if key in self._deployments:
            plan, unused = self._deployments[key].plan, self._scaling.unused_settings(key)
            for each in unused_fields(plan, unused or (), self._scaling.routing_policies(key)):
                self._on_event(Event(plan.name, each.as_ignored, time.monotonic() - self._started_s))
            self._on_change()

    def _changed(self) -> None:
        self._wake.set()
        self._on_change()

    async def _keep_reconciling(self) -> None:
        pause_s = self._settings.backoff_first_s
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                self._reconcile()
                pause_s = self._settings.backoff_first_s
            except Exception:
                # Nothing awaits this task: if it ended, crashed replicas would stay away and edits would have no
                # effect.
                logger.exception("replicas could not be brought in line with the plan; trying again in %g s", pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(self._settings.backoff_longest_s, pause_s * 2)
                self._wake.set()

    def _reconcile(self) -> None:
        for deployment in list(self._deployments.values()):
            self._reconcile_deployment(deployment)
            if not deployment.wanted and not deployment.replicas:
                del self._deployments[deployment.plan.key]
                self._metrics.forget_deployment(deployment.plan.key)
                self._metrics.not_scaled(deployment.plan.key)
        self.gateway.want(self._catalog())
        self._write_targets()

    def _reconcile_deployment(self, deployment: Deployment) -> None:
        if deployment.is_in_effect:
            self._write_served(deployment)
            plan, held = self._plan(deployment), self._held(deployment)
            seen = [replica.observation for replica in deployment.replicas]
            actions = next_actions(plan.groups[0], seen, held, plan.standby)
            staying = [replica for replica in seen if replica.name not in actions.drain]
            self._sleep_calls.start_calls(
                next_standby_actions(plan, staying, held), deployment.replicas, deployment.token
            )
        else:
            actions = Actions(0, [replica.name for replica in deployment.replicas if replica.ending is None])
        num_starts, names = actions
        for replica in [replica for replica in deployment.replicas if replica.name in names]:
            self._drain(deployment, replica)
        for _ in range(num_starts):
            self._start_replica(deployment)

    def _write_served(self, deployment: Deployment) -> None:
        """Write the names and adapters that the engines, which watch the files, are asked to serve."""
        names, adapters = wanted = deployment.plan.names, deployment.plan.adapters
        if deployment.written != wanted:
            contents = ModelNames(names=[*names]), WantedAdapters(adapters=[*adapters])
            for file, content in zip(deployment.served_files, contents, strict=True):
                self._state_dir.replace_json(file, msgspec.to_builtins(content))
            deployment.written = wanted

    def _held(self, deployment: Deployment) -> dict[str, EngineReport]:
        """Return each replica's load, as far as the gateway reports it."""
        reported = self._scaling.held(deployment.plan.key)
        endpoints = {replica.name: replica.endpoint for replica in deployment.replicas}
        return {
            name: reported[endpoint.id]
            for name, endpoint in endpoints.items()
            if endpoint is not None and endpoint.id in reported
        }

    def _start_replica(self, deployment: Deployment) -> None:
        group = deployment.group
        name = unused_name(group.name, {replica.name for replica in self._all_replicas()})
        gpus = self._free_gpus(group.process.gpus)
        names_file, adapters_file = deployment.served_files
        prepare = engine_launcher(
            name,
            group.process,
            deployment.token,
            self._threads_per_engine,
            self._settings,
            self._state_dir,
            gpus,
            (self._state_dir.path / names_file, self._state_dir.path / adapters_file),
        )
        supervisor = Supervisor(
            name,
            prepare,
            readiness=group.process.readiness,
            liveness=group.process.liveness,
            settings=self._settings,
            state_dir=self._state_dir,
            session=self._session,
            on_change=self._changed,
            on_event=self._on_event,
        )
        deployment.replicas.append(Replica(supervisor, group.digest, group.process.drain_timeout_s, gpus))
        supervisor.start()

    def _drain(self, deployment: Deployment, replica: Replica) -> None:
        if replica.ending is None:
            replica.supervisor.announce_end()
            replica.ending = asyncio.create_task(self._end_drained(deployment, replica), name=f"drain:{replica.name}")

    async def _end_drained(self, deployment: Deployment, replica: Replica) -> None:
        """Remove the replica from the gateway, let the engine finish its requests, and end it."""
        self.gateway.want(self._catalog())
        await self.gateway.informed(INFORM_TIMEOUT_S)
        await replica.supervisor.end(replica.drain_timeout_s + KILL_MARGIN_S)
        deployment.replicas.remove(replica)
        self._changed()

    async def _end_now(self, replica: Replica, timeout_s: float) -> None:
        if replica.ending:
            replica.ending.cancel()
            await asyncio.gather(replica.ending, return_exceptions=True)
        await replica.supervisor.end(timeout_s)

    def _all_replicas(self) -> list[Replica]:
        return [replica for deployment in self._deployments.values() for replica in deployment.replicas]

    def _free_gpus(self, number: int) -> tuple[str, ...]:
        in_use = [gpu for replica in self._all_replicas() for gpu in replica.gpus]
        return least_used(self._settings.gpus, in_use, number)

    def _threads_per_engine(self) -> int:
        wanted = sum(self._plan(each).replicas for each in self._deployments.values() if each.is_in_effect)
        return threads_per_engine(self._settings.cores, wanted)

    def _write_targets(self) -> None:
        """Write the targets that Prometheus and `pagemill top` read; both read them again when they change."""
        own: ScrapeTarget = {"targets": [self._own_metrics.address], "labels": {"job": "pagemill-operator"}}
        targets = [own, _target(self.gateway.supervisor, "pagemill-gateway")]
        for key, deployment in self._deployments.items():
            replicas = (replica.supervisor for replica in deployment.replicas)
            targets += [_target(each, "pagemill-engine", pod=each.name, variant=key) for each in replicas]
        found = [target for target in targets if target["targets"]]
        if found == self._targets:
            return
        try:
            self._state_dir.write_targets(found)
            self._targets = found
        except OSError as error:
            logger.warning("the targets of Prometheus and `pagemill top` could not be updated: %s", error)

    def _catalog(self) -> Catalog:
        served = (each for each in self._deployments.values() if each.replicas or each.is_in_effect)
        claimed = {name for each in self._deployments.values() if each.wanted for name in each.plan.names}
        models, now_s = [], time.monotonic()
        for deployment in served:
            former = deployment.former_name(now_s)
            models.append(deployment.catalog_model(former if former not in claimed else None))
            claimed |= {former} if former is not None else set()
        return Catalog(models)


class OwnMetrics:
    """Serves the metrics of the deployments, which an operator exports in a cluster.

    Objectives and limits are among them: without this target, rules would silently take their defaults.
    """

    def __init__(self, scrape: Callable[[str], Scrape]) -> None:
        """`scrape` returns the metrics in the format that the header Accept requests."""
        self._scrape = scrape
        self._runner: web.AppRunner | None = None
        self.address = ""
        """Host and port; empty before `start`."""

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/metrics", self._show)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, 0).start()
        self.address = f"{LOOPBACK}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _show(self, request: web.Request) -> web.Response:
        scrape = self._scrape(request.headers.get("Accept", ""))
        return web.Response(body=scrape.body, headers={"Content-Type": scrape.content_type})


def _target(process: Supervisor, job: str, **labels: str) -> ScrapeTarget:
    """Return a target; it has no address while the process does not answer."""
    addresses = [urlsplit(process.launch.control_url).netloc] if process.launch else []
    return {"targets": addresses, "labels": {"job": job, **labels}}
