"""Puts engine pods to sleep and wakes them, as `backends.standby` decides for each deployment that is scaled.

Level-based: each look compares what shall be with what gateways and pods tell, so a leader that has just come goes on
where the last one was. What a pod is told stands in an annotation until it is ready again, so that everybody who sees
it unready knows why. Calls run beside the looks, one at a time for a pod. Neighbour: `scaling` looks.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import aiohttp

from pagemill_operator.backends.kubernetes.client import ApiError, Client, NotLeading, Unreachable
from pagemill_operator.backends.kubernetes.kinds import POD
from pagemill_operator.backends.kubernetes.observe.pods import Rest, ordered_rest
from pagemill_operator.backends.kubernetes.ownership import is_ending
from pagemill_operator.backends.kubernetes.render.names import REST_ANNOTATION, engine_name
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.backends.standby import Call, Orders, call_engine, next_orders
from pagemill_operator.controller.cache import Cache
from pagemill_operator.load.store import LoadStore
from pagemill_operator.plan.types import Plan
from pagemill_operator.status.observation import Observation, ReplicaObservation

logger = logging.getLogger("pagemill.operator.standby")

BELIEVED_S = 10.0
"""So long after a call the pod counts as what it was told to be: gateways and kubelet take a moment to see it."""
RETRY_S = 10.0
"""After a call that was not followed."""
SETTLED = "NewReplicaSetAvailable"
"""Of a Deployment that has been complete since its template changed: only then Kubernetes waits for no readiness."""
CALLS: Mapping[Rest, Call] = {"asleep": "sleep", "waking": "wake_up"}


class _Told(NamedTuple):
    rest: Rest | None
    """None: it did not follow."""
    until_s: float
    """Infinity while it is being told."""


class Standby:
    def __init__(
        self,
        client: Client,
        cache: Cache,
        loads: LoadStore,
        *,
        token: Callable[[str, str], str | None],
        port: int,
        on_write: Callable[[str, str], None] = lambda kind, verb: None,
    ) -> None:
        """`token`: of the engines of namespace and name. `port`: control port of engines."""
        self._client = client
        self._cache = cache
        self._loads = loads
        self._token = token
        self._port = port
        self._on_write = on_write
        self._session: aiohttp.ClientSession | None = None
        self._told: dict[str, _Told] = {}
        """By uid."""
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled."""
        async with aiohttp.ClientSession(trust_env=False) as session:
            self._session = session
            try:
                await asyncio.Event().wait()
            finally:
                self._session = None
                for task in self._calls:
                    task.cancel()
                await asyncio.gather(*self._calls, return_exceptions=True)

    def look(self, key: str, plan: Plan, seen: Observation) -> None:
        """Begin what is due for one deployment. `plan`: with as many replicas as are wanted."""
        if self._session is None:
            return
        self._forget_past()
        pods = {pod["metadata"]["name"]: pod for pod in self._cache.pods(key) if not is_ending(pod)}
        replicas = [self._as_told(each, pods[each.name]) for each in seen.replicas if each.name in pods]
        orders = self._orders(key, plan, replicas, pods)
        told: list[tuple[Rest, str]] = [("waking", name) for name in orders.wake]
        told += [("asleep", name) for name in orders.sleep]
        for rest, name in told:
            self._told[_uid(pods[name])] = _Told(rest, math.inf)
            self._begin(self._tell(plan, pods[name], rest))
        for pod in (pods[replica.name] for replica in replicas if replica.phase == "ready"):
            if ordered_rest(pod) is not None and _uid(pod) not in self._told:
                self._told[_uid(pod)] = _Told(None, math.inf)
                self._begin(self._ready_again(pod))

    def _orders(
        self, key: str, plan: Plan, replicas: Sequence[ReplicaObservation], pods: Mapping[str, Manifest]
    ) -> Orders:
        held = self._loads.held(key)
        orders = next_orders(plan, replicas, {name: held[_uid(pod)] for name, pod in pods.items() if _uid(pod) in held})
        free = [name for name, pod in pods.items() if _uid(pod) not in self._told]
        sleep = orders.sleep if self._is_settled(key, plan) else []
        return Orders([name for name in orders.wake if name in free], [name for name in sleep if name in free])

    def _is_settled(self, key: str, plan: Plan) -> bool:
        deployment = self._cache.children(key).get(("Deployment", engine_name(plan.name)), {})
        conditions = deployment.get("status", {}).get("conditions") or []
        return any(each["type"] == "Progressing" and each.get("reason") == SETTLED for each in conditions)

    def _as_told(self, replica: ReplicaObservation, pod: Manifest) -> ReplicaObservation:
        told = self._told.get(_uid(pod))
        if told is None or told.rest is None or not replica.loaded:
            return replica
        is_seen = replica.phase == "asleep" if told.rest == "asleep" else replica.phase in ("ready", "waking")
        if is_seen and told.until_s < math.inf:
            del self._told[_uid(pod)]
        return replica if is_seen else replace(replica, phase=told.rest)

    def _forget_past(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._told = {uid: told for uid, told in self._told.items() if told.until_s > now_s}

    async def _tell(self, plan: Plan, pod: Manifest, rest: Rest) -> None:
        """Annotation and call are both there for themselves: neither waits for the other."""
        where, told = f"{plan.namespace}/{pod['metadata']['name']}", _Told(None, _now_s() + RETRY_S)
        try:
            unwritten, unheard = await asyncio.gather(self._annotate(pod, rest), self._call(plan, pod, CALLS[rest]))
            for fault in filter(None, (unwritten, unheard)):
                logger.warning("%s: %s: %s", where, CALLS[rest], fault)
            if not unheard:
                logger.info("%s: %s", where, CALLS[rest])
                told = _Told(rest, _now_s() + BELIEVED_S)
        finally:
            self._told[_uid(pod)] = told

    async def _ready_again(self, pod: Manifest) -> None:
        self._told[_uid(pod)] = _Told(None, _now_s() + RETRY_S)
        if not await self._annotate(pod, None):
            del self._told[_uid(pod)]

    async def _call(self, plan: Plan, pod: Manifest, call: Call) -> str:
        token, address = self._token(plan.namespace, plan.name), pod.get("status", {}).get("podIP")
        if self._session is None or not token or not address:
            return "its address or its token is not known"
        host = f"[{address}]" if ":" in address else address
        return await call_engine(self._session, f"http://{host}:{self._port}", token, call)

    async def _annotate(self, pod: Manifest, rest: Rest | None) -> str:
        """What it met, if anything."""
        metadata = pod["metadata"]
        self._on_write(POD.name, "rest")
        patch = {"metadata": {"annotations": {REST_ANNOTATION: rest}}}
        try:
            answer = await self._client.merge(POD, metadata["namespace"], metadata["name"], patch)
        except (ApiError, Unreachable, NotLeading) as error:
            return f"its annotation was not written: {error or type(error).__name__}"
        self._cache.put(POD.name, answer)
        return ""

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(_logged(work))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


async def _logged(work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except Exception:
        logger.exception("a pod could not be told to sleep or to wake up")


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _uid(pod: Manifest) -> str:
    return str(pod["metadata"]["uid"])
