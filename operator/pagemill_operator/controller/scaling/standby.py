"""Puts engine pods to sleep and wakes them, as `backends.standby` decides for each scaled deployment.

It is level-based: each look compares the wanted state with what gateways and pods report, so a new leader continues
where the last one stopped. An annotation keeps what a pod was ordered to do until it is ready again, which explains
why the pod is not ready. Calls run concurrently with the looks, one per pod. `scaling` calls `look`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import aiohttp

from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError, NotLeading, Unreachable
from pagemill_operator.backends.kubernetes.kinds import POD
from pagemill_operator.backends.kubernetes.observe.pods import OrderedState, ordered_state
from pagemill_operator.backends.kubernetes.ownership import is_ending
from pagemill_operator.backends.kubernetes.render.names import SLEEP_ANNOTATION, engine_name
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.backends.standby import Call, StandbyActions, call_engine, next_standby_actions
from pagemill_operator.config import EngineTLSSettings
from pagemill_operator.controller.watching.cache import ObjectCache
from pagemill_operator.load.store import LoadStore
from pagemill_operator.plan.types import Plan
from pagemill_operator.status.observation import Observation, ReplicaObservation
from pagemill_protocol.engine_ports import TLS_CONTROL_PORT, engine_url
from pagemill_servers.tls.certificates import EngineTrust

logger = logging.getLogger("pagemill.operator.standby")

PENDING_LIMIT_S = 10.0
"""Seconds for which a pod counts as in the ordered phase after a call: gateways and kubelet notice it a little later.
"""
RETRY_S = 10.0
"""Seconds before a call that failed is repeated."""
SETTLED = "NewReplicaSetAvailable"
"""The reason of a Deployment whose rollout is complete: Kubernetes does not wait for any pod's readiness."""
CALLS: Mapping[OrderedState, Call] = {"asleep": "sleep", "waking": "wake_up"}


class _PendingCall(NamedTuple):
    rest: OrderedState | None
    """None if the call failed."""
    until_s: float
    """Time until which the entry counts; infinity while the call runs."""


class Standby:
    def __init__(
        self,
        client: Client,
        cache: ObjectCache,
        loads: LoadStore,
        *,
        token: Callable[[str, str], str | None],
        port: int,
        tls: EngineTLSSettings,
        on_write: Callable[[str, str], None] = lambda kind, verb: None,
    ) -> None:
        """`token` returns the token of a deployment's engines, by namespace and name. `port` is for engines without
        TLS.
        """
        self._client = client
        self._cache = cache
        self._loads = loads
        self._token = token
        self._port = port
        self._tls = tls
        self._on_write = on_write
        self._session: aiohttp.ClientSession | None = None
        self._pending_calls: dict[str, _PendingCall] = {}
        """Orders by pod uid."""
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Keep the HTTP session open until cancelled."""
        trust = EngineTrust(self._tls.ca_file, self._tls.server_name) if self._tls.secret else True
        connector = aiohttp.TCPConnector(ssl=trust)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            self._session = session
            try:
                await asyncio.Event().wait()
            finally:
                self._session = None
                for task in self._calls:
                    task.cancel()
                await asyncio.gather(*self._calls, return_exceptions=True)

    def look(self, key: str, plan: Plan, seen: Observation) -> None:
        """Start the calls that are due for one deployment. `plan` must have the wanted number of replicas."""
        if self._session is None:
            return
        self._forget_expired()
        pods = {pod["metadata"]["name"]: pod for pod in self._cache.pods(key) if not is_ending(pod)}
        replicas = [self._with_pending_call(each, pods[each.name]) for each in seen.replicas if each.name in pods]
        standby_actions = self._standby_actions(key, plan, replicas, pods)
        ordered: list[tuple[OrderedState, str]] = [("waking", name) for name in standby_actions.wake]
        ordered += [("asleep", name) for name in standby_actions.sleep]
        for rest, name in ordered:
            self._pending_calls[_uid(pods[name])] = _PendingCall(rest, math.inf)
            self._begin(self._order(plan, pods[name], rest))
        for pod in (pods[replica.name] for replica in replicas if replica.phase == "ready"):
            if ordered_state(pod) is not None and _uid(pod) not in self._pending_calls:
                self._pending_calls[_uid(pod)] = _PendingCall(None, math.inf)
                self._begin(self._ready_again(pod))

    def _standby_actions(
        self, key: str, plan: Plan, replicas: Sequence[ReplicaObservation], pods: Mapping[str, Manifest]
    ) -> StandbyActions:
        held = self._loads.held(key)
        standby_actions = next_standby_actions(
            plan, replicas, {name: held[_uid(pod)] for name, pod in pods.items() if _uid(pod) in held}
        )
        free = [name for name, pod in pods.items() if _uid(pod) not in self._pending_calls]
        sleep = standby_actions.sleep if self._is_settled(key, plan, replicas) else []
        return StandbyActions(
            [name for name in standby_actions.wake if name in free], [name for name in sleep if name in free]
        )

    def _is_settled(self, key: str, plan: Plan, replicas: Sequence[ReplicaObservation]) -> bool:
        if plan.pods_per_replica > 1:
            digest = plan.groups[0].digest
            return len(replicas) == plan.all_replicas and all(each.digest == digest for each in replicas)
        deployment = self._cache.children(key).get(("Deployment", engine_name(plan.name)), {})
        conditions = deployment.get("status", {}).get("conditions") or []
        return any(each["type"] == "Progressing" and each.get("reason") == SETTLED for each in conditions)

    def _with_pending_call(self, replica: ReplicaObservation, pod: Manifest) -> ReplicaObservation:
        ordered = self._pending_calls.get(_uid(pod))
        if ordered is None or ordered.rest is None or not replica.loaded:
            return replica
        is_seen = replica.phase == "asleep" if ordered.rest == "asleep" else replica.phase in ("ready", "waking")
        if is_seen and ordered.until_s < math.inf:
            del self._pending_calls[_uid(pod)]
        return replica if is_seen else replace(replica, phase=ordered.rest)

    def _forget_expired(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._pending_calls = {uid: each for uid, each in self._pending_calls.items() if each.until_s > now_s}

    async def _order(self, plan: Plan, pod: Manifest, rest: OrderedState) -> None:
        """Annotate the pod and call its engine concurrently; neither waits for the other."""
        where, ordered = f"{plan.namespace}/{pod['metadata']['name']}", _PendingCall(None, _now_s() + RETRY_S)
        try:
            unwritten, refused = await asyncio.gather(self._annotate(pod, rest), self._call(plan, pod, CALLS[rest]))
            for fault in filter(None, (unwritten, refused)):
                logger.warning("%s: %s: %s", where, CALLS[rest], fault)
            if not refused:
                logger.info("%s: %s", where, CALLS[rest])
                ordered = _PendingCall(rest, _now_s() + PENDING_LIMIT_S)
        finally:
            self._pending_calls[_uid(pod)] = ordered

    async def _ready_again(self, pod: Manifest) -> None:
        self._pending_calls[_uid(pod)] = _PendingCall(None, _now_s() + RETRY_S)
        if not await self._annotate(pod, None):
            del self._pending_calls[_uid(pod)]

    async def _call(self, plan: Plan, pod: Manifest, call: Call) -> str:
        token, address = self._token(plan.namespace, plan.name), pod.get("status", {}).get("podIP")
        if self._session is None or not token or not address:
            return "its address or its token is not known"
        control_url = engine_url(address, TLS_CONTROL_PORT if _uses_tls(pod) else self._port)
        return await call_engine(self._session, control_url, token, call)

    async def _annotate(self, pod: Manifest, rest: OrderedState | None) -> str:
        """Write or remove the annotation; return the error, or ""."""
        metadata = pod["metadata"]
        self._on_write(POD.name, "rest")
        patch = {"metadata": {"annotations": {SLEEP_ANNOTATION: rest}}}
        try:
            answer = await self._client.merge(POD, metadata["namespace"], metadata["name"], patch)
        except (ApiError, Unreachable, NotLeading) as error:
            return f"the pod's annotation was not written: {str(error) or type(error).__name__}"
        self._cache.put(POD.name, answer)
        return ""

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(_logged(work))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


def _uses_tls(pod: Manifest) -> bool:
    ports = [port for container in pod["spec"].get("containers", []) for port in container.get("ports", [])]
    return any(port["containerPort"] == TLS_CONTROL_PORT for port in ports)


async def _logged(work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except Exception:
        logger.exception("a pod could not be put to sleep or woken")


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _uid(pod: Manifest) -> str:
    return str(pod["metadata"]["uid"])
