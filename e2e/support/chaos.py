"""Faults of everything that Pagemill runs on, each a function of the world that it strikes.

A function returns when the fault has occurred and, if it is a state, has been ended again; `World.recovered` then waits
until everything is ready. The load and what its clients must get is the case's (`e2e/chaos`).
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from support.black_hole import swallowed
from support.clusters import OneNode
from support.deployments import Deployed
from support.dropping import dropping
from support.kubectl import Kubectl
from support.load_stream import cut
from support.processes import kill_pod, of_pod, restart_count
from support.release import Release
from support.waiting import until

ENGINE, GATEWAY, OPERATOR, REDIS = "pagemill_engine", "pagemill_gateway", "pagemill_operator", "redis-server"
FROM_ENGINES = "tcp sport { 8000, 8001 }"
"""What an engine sends to gateways and to the kubelet."""
LASTS_S = 12.0
"""Seconds that a fault lasts which is a state, such as a suspended process."""
RECOVERED_S = 300.0

Pod = dict[str, Any]


@dataclass
class World:
    node: OneNode
    release: Release
    chat: Deployed
    replicas: int
    num_rollouts: int = field(default=0)

    @property
    def system(self) -> Kubectl:
        return self.node.kubectl.within(self.release.namespace)

    def engines(self) -> list[Pod]:
        return sorted(self.chat.pods(), key=lambda pod: str(pod["metadata"]["name"]))

    def recovered(self) -> None:
        """Wait until the node, all pods of the release and every engine are ready."""
        self.release.wait_ready()
        until("every engine is ready", self._engines_are_ready, timeout_s=RECOVERED_S, interval_s=0.25)
        self.chat.wait_ready(self.replicas, RECOVERED_S)

    def _engines_are_ready(self) -> bool:
        ready = [pod for pod in self.engines() if _is_ready(pod)]
        return len(ready) == len(self.engines()) == self.replicas


@dataclass(frozen=True)
class Fault:
    name: str
    strike: Callable[[World], None]
    ends_connections: bool = False
    """Whether clients' connections end with a process: no other can continue what a client reads from a socket."""


def kill(world: World, pods: Callable[[World], list[Pod]], program: str) -> None:
    """Kill all processes of these pods; return when the kubelet has started them again."""
    struck = pods(world)
    for pod in struck:
        kill_pod(pod, program)
    for pod in struck:
        until("the kubelet has started it again", partial(_was_restarted, world, pod), timeout_s=RECOVERED_S)


def suspend_engine(world: World) -> None:
    stopped = of_pod(world.engines()[0], ENGINE)
    for process in stopped:
        process.signal(signal.SIGSTOP)
    time.sleep(LASTS_S)
    for process in stopped:
        with contextlib.suppress(ProcessLookupError):  # the kubelet may have replaced it
            process.signal(signal.SIGCONT)


def during(state: Callable[[World], AbstractContextManager[object]], world: World) -> None:
    """Let the state last for a while."""
    with state(world):
        time.sleep(LASTS_S)


def delete_engine(world: World, *arguments: str) -> None:
    name = f"pod/{world.engines()[0]['metadata']['name']}"
    world.chat.kubectl.ok("delete", name, "--wait=false", *arguments)
    world.chat.kubectl.wait(name, "delete", RECOVERED_S)


def evict_engine(world: World) -> None:
    name = world.engines()[0]["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/{world.chat.kubectl.namespace}/pods/{name}/eviction"

    def evict() -> subprocess.CompletedProcess[str]:
        return world.chat.kubectl.run("create", "--raw", path, "-f", "-", stdin=eviction)

    until("the budget allows the eviction", lambda: evict().returncode == 0, timeout_s=RECOVERED_S, interval_s=1)
    world.chat.kubectl.wait(f"pod/{name}", "delete", RECOVERED_S)


def roll(world: World) -> None:
    old = world.engines()
    world.num_rollouts += 1
    world.chat.patch(engine={"maxNumSeqs": 8 - world.num_rollouts % 2})
    world.chat.wait_rolled_out(old, RECOVERED_S)


def scale(world: World) -> None:
    for replicas in (world.replicas + 1, world.replicas):
        world.chat.scale(replicas)
        world.chat.wait_ready(replicas, RECOVERED_S)


def delete_gateway(world: World) -> None:
    name = f"pod/{world.release.pods('gateway')[0]['metadata']['name']}"
    world.system.ok("delete", name, "--wait=false")
    world.system.wait(name, "delete", RECOVERED_S)


def kill_control_process(world: World) -> None:
    """Kill what decides for the workers of one gateway, which stay."""
    pod = world.release.pods("gateway")[0]
    program = f"{GATEWAY}.processes control"
    (process,) = of_pod(pod, program)
    process.signal(signal.SIGKILL)
    until("it was replaced", lambda: _pids(pod, program) - {process.pid}, timeout_s=60)


def all_at_once(world: World) -> None:
    """An engine, the leading operator, a control process and Redis die while there is no API server."""
    engine, leader, redis = world.engines()[0], world.release.leader(), world.release.pods("redis")[0]
    (control,) = of_pod(world.release.pods("gateway")[0], f"{GATEWAY}.processes control")
    with world.node.without("kube-apiserver"):
        control.signal(signal.SIGKILL)
        for pod, program in ((engine, ENGINE), (leader, OPERATOR), (redis, REDIS)):
            kill_pod(pod, program)
        time.sleep(LASTS_S)


def _is_ready(pod: Pod) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))


def _was_restarted(world: World, pod: Pod) -> bool:
    metadata = pod["metadata"]
    now = world.node.kubectl.within(metadata["namespace"]).json("get", f"pod/{metadata['name']}")
    return restart_count(now) > restart_count(pod)


def _pids(pod: Pod, program: str) -> set[int]:
    try:
        return {process.pid for process in of_pod(pod, program)}
    except AssertionError:
        return set()


def _first_engine(world: World) -> list[Pod]:
    return world.engines()[:1]


def _first_gateway(world: World) -> list[Pod]:
    return world.release.pods("gateway")[:1]


FAULTS = (
    Fault("engine killed", partial(kill, pods=_first_engine, program=ENGINE)),
    Fault("every engine killed", partial(kill, pods=World.engines, program=ENGINE)),
    Fault("engine suspended", suspend_engine),
    Fault(
        "engine cut off the network",
        partial(during, lambda world: dropping(_first_engine(world), ENGINE, sent=FROM_ENGINES)),
    ),
    Fault("engine deleted", delete_engine),
    Fault("engine deleted without grace", lambda world: delete_engine(world, "--grace-period=0", "--force")),
    Fault("engine evicted", evict_engine),
    Fault("rollout", roll),
    Fault("scaled up and down", scale),
    Fault("control process of a gateway killed", kill_control_process),
    Fault("gateway deleted", delete_gateway),
    Fault("gateway killed", partial(kill, pods=_first_gateway, program=GATEWAY), ends_connections=True),
    Fault("leading operator killed", partial(kill, pods=lambda world: [world.release.leader()], program=OPERATOR)),
    Fault("load streams cut", partial(during, lambda world: cut(world.release.pods("operator")))),
    Fault("watches silent", partial(during, lambda world: swallowed(world.release.pods("gateway"), GATEWAY))),
    Fault("Redis killed", partial(kill, pods=lambda world: world.release.pods("redis"), program=REDIS)),
    Fault("API server away", partial(during, lambda world: world.node.without("kube-apiserver"))),
    Fault("etcd away", partial(during, lambda world: world.node.without("etcd"))),
    Fault("kubelet away", partial(during, lambda world: world.node.without("kubelet"))),
    Fault("many at once", all_at_once),
)
