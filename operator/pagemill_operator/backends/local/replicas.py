"""Deployments and replicas on this machine: how an engine is started, observed, put to sleep and woken.

`backend` decides what is started and drained; `supervisor` keeps each process running.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from pagemill_operator.backends.base import FORMER_NAME_S
from pagemill_operator.backends.local.machine import VISIBLE
from pagemill_operator.backends.local.ports import free_port
from pagemill_operator.backends.local.settings import LocalSettings
from pagemill_operator.backends.local.state_dir import StateDir
from pagemill_operator.backends.local.supervisor import Launch, Supervisor
from pagemill_operator.backends.standby import Call, StandbyActions, call_engine
from pagemill_operator.plan.types import Group, Plan, Problem, Process
from pagemill_operator.status.conditions import ReplicaObservation
from pagemill_protocol.catalog import CatalogModel, Endpoint, catalog_model
from pagemill_protocol.report.adapters import WantedAdapter

LOOPBACK = "127.0.0.1"
SLEEP_RETRY_S = 10.0
"""Seconds before a sleep or wake call that failed is repeated."""


@dataclass(eq=False)
class Replica:
    """One engine process and the digest of its plan."""

    supervisor: Supervisor
    digest: str
    drain_timeout_s: float
    gpus: tuple[str, ...] = ()
    """The GPUs that the engine uses."""
    ending: asyncio.Task[None] | None = field(default=None)
    """Set once the replica is being drained."""
    ordered: Literal["asleep", "waking"] | None = None
    """The phase that the replica was ordered to take, while the call runs."""

    @property
    def name(self) -> str:
        return self.supervisor.name

    @property
    def observation(self) -> ReplicaObservation:
        seen, phase = self.supervisor, self.supervisor.phase
        if (phase, self.ordered) in (("asleep", "waking"), ("ready", "asleep")):
            phase = self.ordered or phase
        return ReplicaObservation(seen.name, phase, self.digest, seen.reason, seen.message, seen.ready_at)

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint for the gateway; None until the engine's control port answers."""
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


@dataclass(eq=False)
class Deployment:
    plan: Plan
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    replicas: list[Replica] = field(default_factory=list)
    """Oldest first."""
    conflict: Problem | None = None
    wanted: bool = True
    written: tuple[tuple[str, ...], tuple[WantedAdapter, ...]] | None = None
    """The names and adapters in the files that the engines watch."""
    former: tuple[str, float] | None = None
    """The name before the latest change of it, and the monotonic time until which it is served at least."""

    def want(self, plan: Plan, now_s: float) -> bool:
        """Want this plan from now on; return whether the model gets another name."""
        is_renamed = plan.model_name != self.plan.model_name
        if is_renamed:
            self.former = (self.plan.model_name, now_s + FORMER_NAME_S)
        self.plan, self.wanted = plan, True
        return is_renamed

    def former_name(self, now_s: float) -> str | None:
        """Return the former name if clients may still send it: for a while, and until no replica of an earlier spec is
        left.
        """
        if self.former is None:
            return None
        name, until_s = self.former
        is_replaced = any(replica.digest != self.group.digest for replica in self.replicas)
        return name if now_s < until_s or is_replaced else None

    @property
    def served_files(self) -> tuple[str, str]:
        """The files of names and adapters."""
        start = f"{self.plan.namespace}.{self.plan.name}"
        return f"{start}.names.json", f"{start}.adapters.json"

    @property
    def group(self) -> Group:
        return self.plan.groups[0]

    @property
    def is_in_effect(self) -> bool:
        return self.wanted and self.conflict is None and not self.plan.problems

    def catalog_model(self, former: str | None) -> CatalogModel:
        """Return the deployment as the gateway serves it, under its former name too if one is given."""
        plan = self.plan
        served = (
            plan.served
            if former is None
            else msgspec.structs.replace(plan.served, aliases=[*plan.served.aliases, former])
        )
        endpoints = [replica.endpoint for replica in self.replicas]
        return catalog_model(
            served,
            namespace=plan.namespace,
            deployment=plan.name,
            engine_token=self.token,
            adapters=[each.name for each in plan.adapters],
            wakes=self.is_in_effect and plan.autoscaling is not None and plan.autoscaling.mode == "Active",
            endpoints=[endpoint for endpoint in endpoints if endpoint is not None],
        )


class SleepCalls:
    """Puts this machine's engines to sleep and wakes them, one call at a time per engine; `standby` decides which."""

    def __init__(self, session: aiohttp.ClientSession, on_change: Callable[[], None]) -> None:
        self._session = session
        self._on_change = on_change
        self._calls: dict[str, asyncio.Task[None]] = {}
        """Running calls by replica name."""

    def start_calls(self, standby_actions: StandbyActions, replicas: Iterable[Replica], token: str) -> None:
        for replica in replicas:
            if replica.name in self._calls:
                continue
            if replica.name in standby_actions.wake:
                replica.ordered = "waking"
                self._begin(replica, token, "wake_up")
            elif replica.name in standby_actions.sleep:
                replica.ordered = "asleep"
                self._begin(replica, token, "sleep")

    async def close(self) -> None:
        calls = list(self._calls.values())
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _begin(self, replica: Replica, token: str, call: Call) -> None:
        self._calls[replica.name] = asyncio.create_task(self._run(replica, token, call), name=f"{call}:{replica.name}")

    async def _run(self, replica: Replica, token: str, call: Call) -> None:
        launch, fault = replica.supervisor.launch, ""
        try:
            if launch is not None:
                fault = await call_engine(self._session, launch.control_url, token, call)
            await replica.supervisor.refresh()
            replica.ordered = None
            if fault:
                replica.supervisor.warn(f"{call} failed: {fault}")
                self._on_change()
                await asyncio.sleep(SLEEP_RETRY_S)
        finally:
            replica.ordered = None
            del self._calls[replica.name]
            self._on_change()


def engine_launcher(
    name: str,
    process: Process,
    token: str,
    num_threads: Callable[[], int],
    settings: LocalSettings,
    state_dir: StateDir,
    gpus: tuple[str, ...],
    served_files: tuple[Path, Path],
) -> Callable[[], Launch]:
    """Return a function that prepares a start of the replica `name`, with new ports each time.

    `gpus` are the only devices that the engine sees; none: it sees all; `served_files` list its names and adapters.
    """

    names_file, adapters_file = served_files

    def prepare() -> Launch:
        data_port, control_port = free_port(LOOPBACK), free_port(LOOPBACK)
        content = _on_this_machine(process.settings, data_port, control_port, token, num_threads())
        if content["engine"].get("enable_lora"):
            content["engine"]["adapters_file"] = str(adapters_file)
        content["server"]["names_file"] = str(names_file)
        path = state_dir.write_json(f"{name}.json", content)
        # A killed engine's temporary files are removed with the state folder.
        temporary = {"TMPDIR": str(state_dir.temporary)} if state_dir.temporary else {}
        device = {VISIBLE: ",".join(gpus)} if gpus else {}
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
    """Return the planned settings with this machine's addresses, a token, and a share of its cores."""
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
    """Return the first of `group-0`, `group-1`... that no replica has."""
    index = 0
    while f"{group}-{index}" in taken:
        index += 1
    return f"{group}-{index}"
