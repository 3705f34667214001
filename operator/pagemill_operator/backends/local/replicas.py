"""Replicas of one deployment on this machine: how an engine is started, and what each replica is observed to do."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pagemill_operator.backends.local.gpus import VISIBLE
from pagemill_operator.backends.local.ports import free_port
from pagemill_operator.backends.local.settings import LocalSettings
from pagemill_operator.backends.local.state_dir import StateDir
from pagemill_operator.backends.local.supervisor import Launch, Supervisor
from pagemill_operator.plan.types import Process
from pagemill_operator.status.conditions import ReplicaObservation
from pagemill_protocol.catalog import Endpoint

LOOPBACK = "127.0.0.1"


@dataclass(eq=False)
class Replica:
    """One engine process and the digest it was planned with."""

    supervisor: Supervisor
    digest: str
    drain_timeout_s: float
    gpu: str | None = None
    """The device that it computes on."""
    ending: asyncio.Task[None] | None = field(default=None)
    """Set once it is being drained."""
    ordered: Literal["asleep", "waking"] | None = None
    """What it was told to be, while it is being told."""

    @property
    def name(self) -> str:
        return self.supervisor.name

    @property
    def observation(self) -> ReplicaObservation:
        seen, phase = self.supervisor, self.supervisor.phase
        if (phase, self.ordered) in (("asleep", "waking"), ("ready", "asleep")):
            phase = self.ordered or phase
        return ReplicaObservation(seen.name, phase, self.digest, seen.reason, seen.message)

    @property
    def endpoint(self) -> Endpoint | None:
        """How the gateway reaches it; `None` until its control port answers."""
        launch, pid = self.supervisor.launch, self.supervisor.pid
        if launch is None or pid is None:
            return None
        return Endpoint(
            id=f"{self.name}-{pid}",
            data_url=launch.data_url,
            control_url=launch.control_url,
            terminating=self.supervisor.phase == "draining",
            probed_ready=self.supervisor.phase == "ready",
        )


def engine_launcher(
    name: str,
    process: Process,
    token: str,
    num_threads: Callable[[], int],
    settings: LocalSettings,
    state_dir: StateDir,
    gpu: str | None,
) -> Callable[[], Launch]:
    """How to start the replica `name`, with new ports each time. `gpu`: the only device that it sees."""

    def prepare() -> Launch:
        data_port, control_port = free_port(LOOPBACK), free_port(LOOPBACK)
        content = _on_this_machine(process.settings, data_port, control_port, token, num_threads())
        path = state_dir.write_json(f"{name}.json", content)
        # What a killed engine leaves in the temporary folder goes with the state folder.
        temporary = {"TMPDIR": str(state_dir.temporary)} if state_dir.temporary else {}
        device = {} if gpu is None else {VISIBLE: gpu}
        return Launch(
            command=(settings.python, "-m", process.module, "--settings", str(path)),
            environment={**settings.environment, **temporary, **device, **process.environment},
            data_url=f"http://{LOOPBACK}:{data_port}",
            control_url=f"http://{LOOPBACK}:{control_port}",
        )

    return prepare


def _on_this_machine(
    planned: dict[str, Any], data_port: int, control_port: int, token: str, num_threads: int
) -> dict[str, Any]:
    """The planned settings with this machine's addresses, a token, and a share of its cores."""
    content = copy.deepcopy(planned)
    content["engine"].setdefault("num_threads", num_threads)
    content["server"] |= {
        "host": LOOPBACK,
        "port": data_port,
        "control_host": LOOPBACK,
        "control_port": control_port,
        "internal_token": token,
    }
    return content


def unused_name(group: str, taken: set[str]) -> str:
    """The first of `group-0`, `group-1`... that no replica bears."""
    index = 0
    while f"{group}-{index}" in taken:
        index += 1
    return f"{group}-{index}"
