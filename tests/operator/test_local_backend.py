"""The local backend with real gateway and engine server processes and a simulated device."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import fork_server
import psutil
import pytest
from hung_processes import hang
from started_by_fork import executed
from waiting import eventually

from pagemill_operator.backends.base import BackendError
from pagemill_operator.backends.local.ports import PortInUse
from pagemill_operator.plan import Plan, Probe
from pagemill_operator.status.conditions import find_conditions

pytestmark = pytest.mark.slow

Machine = Any


async def ask(session: aiohttp.ClientSession, machine: Machine, model: str = "chat") -> int:
    """Send one short chat through the gateway; return its status."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with session.post(f"{machine.backend.base_url}/v1/chat/completions", json=body) as response:
        await response.read()
        return response.status


async def until(session: aiohttp.ClientSession, machine: Machine, status: int) -> None:
    """Wait until the gateway has noticed a change of engines, which it does by itself."""

    async def is_so() -> bool:
        return await ask(session, machine) == status

    await eventually(is_so, every_s=0.05)


def family() -> set[int]:
    """Return the living descendants of this process, without the fork server, which lives as long as this process."""
    return {child.pid for child in psutil.Process().children(recursive=True) if _is_living(child)}


def _is_living(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and fork_server.__file__ not in process.cmdline()
    except psutil.NoSuchProcess:
        return False


async def test_the_backend_serves_survives_crashes_and_stops_without_remains(
    make_machine: Callable[..., Machine],
) -> None:
    before = family()
    machine = make_machine()
    await machine.backend.start()
    try:
        plan = machine.plan(replicas=2)
        await machine.backend.apply([plan])
        await machine.until_ready(plan)
        _assert_private(machine.folder)
        ports = _listening_ports(family() - before)
        assert len(ports) == 6, "three processes with a data and a control port each"
        async with aiohttp.ClientSession() as session:
            await until(session, machine, 200)
            await _crash_an_engine(session, machine, plan)
            await _crash_the_gateway(session, machine)
        ports |= _listening_ports(family() - before)
    finally:
        await machine.backend.stop()
    assert family() <= before
    assert list(machine.folder.iterdir()) == []
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


async def test_what_an_engine_does_before_it_is_ready_is_reported(machine: Machine) -> None:
    """Of up to twenty starts, because a small model may be loaded and its steps measured between two looks."""
    for number in range(20):
        plan = _asking_often(machine.plan(f"chat{number}"), livez=60)
        await machine.backend.apply([plan])
        await machine.until_ready(plan)
        reasons = [event.message for event in machine.events if event.subject == f"chat{number}-0"]
        assert reasons[-1] == "ready"
        if any("loading" in reason or "warming" in reason for reason in reasons):
            return
    pytest.fail(f"{machine.events}")


async def _crash_an_engine(session: aiohttp.ClientSession, machine: Machine, plan: Plan) -> None:
    victim, other = machine.pids(plan)
    os.kill(victim, signal.SIGKILL)
    await machine.until(lambda: any(event.warning for event in machine.events))
    await until(session, machine, 200)
    await machine.until_ready(plan)
    assert machine.pids(plan)[0] != victim
    assert machine.pids(plan)[1] == other
    (crash,) = [event for event in machine.events if event.warning]
    assert crash.subject == "chat-0"
    assert "SIGKILL" in crash.message
    assert "starting again in" in crash.message


async def _crash_the_gateway(session: aiohttp.ClientSession, machine: Machine) -> None:
    gateway = machine.backend.gateway.supervisor
    os.kill(gateway.pid, signal.SIGKILL)
    await machine.until(lambda: gateway.num_crashes == 1 and gateway.phase == "ready")
    await until(session, machine, 200)


async def test_an_edit_is_rolled_out_without_a_failed_request_and_an_equal_plan_changes_nothing(
    machine: Machine,
) -> None:
    plan = machine.plan(replicas=1)
    await machine.backend.apply([plan])
    await machine.until_ready(plan)
    (first,) = machine.pids(plan)
    await machine.backend.apply([machine.plan(replicas=1)])
    assert machine.pids(plan) == [first]

    statuses: list[int] = []
    rolled = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        await until(session, machine, 200)
        traffic = asyncio.create_task(_traffic(session, machine, statuses, rolled))
        # Clients go on sending the former name.
        edited = machine.plan(replicas=2, engine__maxNumSeqs=8, model__name="assistant")
        await machine.backend.apply([edited])
        await machine.until(lambda: _rolled(machine, edited))
        assert await ask(session, machine, "assistant") == 200
        await _scale_down(machine, machine.plan(replicas=1, engine__maxNumSeqs=8, model__name="assistant"))
        rolled.set()
        await traffic
        assert len(statuses) > 5
        assert set(statuses) == {200}
        assert not psutil.pid_exists(first)

        await machine.backend.forget([plan.key])
        await machine.until(lambda: _forgotten(machine, edited))
        await until(session, machine, 404)


async def _scale_down(machine: Machine, fewer: Plan) -> None:
    before = machine.pids(fewer)
    await machine.backend.apply([fewer])
    await machine.until(lambda: _rolled(machine, fewer))
    (left,) = machine.pids(fewer)
    assert left in before, "the emptiest replica must be removed"
    assert machine.ready(fewer)


async def test_for_a_model_that_cannot_be_loaded_the_true_cause_is_named(machine: Machine, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 100)
    plan = machine.plan(model__source=f"file://{broken}", engine__extraArgs=[])
    await machine.backend.apply([plan])
    await machine.until(lambda: machine.backend.supervisors(plan.key)[0].phase == "crashed")
    ready = find_conditions(machine.backend.observe(plan.key))[-1]
    assert ready.reason == "ModelUnreadable"
    assert "broken.gguf" in ready.message


async def test_the_younger_deployment_of_a_name_starts_nothing(machine: Machine) -> None:
    older, younger = machine.plan("a", model__name="m"), machine.plan("b", model__name="m")
    await machine.backend.apply([older, younger])
    assert machine.backend.supervisors(younger.key) == []
    assert find_conditions(machine.backend.observe(younger.key))[-1].reason == "NameConflict"


async def test_a_port_in_use_is_reported_before_anything_starts(make_machine: Callable[..., Machine]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        machine = make_machine(port=listener.getsockname()[1])
        with pytest.raises(PortInUse) as failure:
            await machine.backend.start()
    assert isinstance(failure.value, BackendError)
    await machine.backend.stop()
    assert list(machine.folder.iterdir()) == []


async def test_conditions_name_what_keeps_the_gateway_from_being_ready(make_machine: Callable[..., Machine]) -> None:
    machine = make_machine(gateway_module="this.does.not.exist")
    plan = machine.plan()
    await machine.backend.start()
    try:
        await machine.backend.apply([plan])
        cause = "the gateway is not ready: ended with exit code 1"
        await eventually(lambda: machine.backend.observe(plan.key).gateway_message.startswith(cause))
    finally:
        await machine.backend.stop()


async def test_a_running_answer_ends_with_an_error_event_when_everything_stops(
    make_machine: Callable[..., Machine],
) -> None:
    machine = make_machine(stop_timeout_s=8.0)
    await machine.backend.start()
    slow = ["--null-runner", "--num-kv-blocks=256", '--step-time={"knots_tokens": [1, 512], "knot_ms": [50, 50]}']
    plan = machine.plan(engine__extraArgs=slow)
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}
    try:
        await machine.backend.apply([plan])
        await machine.until_ready(plan)
        async with aiohttp.ClientSession() as session:
            await until(session, machine, 200)
            url = f"{machine.backend.base_url}/v1/chat/completions"
            async with session.post(url, json={**body, "max_tokens": 400}) as response:
                await response.content.readline()
                stopping = asyncio.create_task(machine.backend.stop())
                text = await response.text()
                await stopping
    finally:
        await machine.backend.stop()
    assert "draining" in text.splitlines()[-2], text[-300:]
    assert "[DONE]" not in text


async def test_an_engine_that_stops_answering_becomes_unready_and_is_replaced(
    make_machine: Callable[..., Machine],
) -> None:
    machine = make_machine(stop_timeout_s=0.2, watch_interval_s=0.1)
    await machine.backend.start()
    try:
        plan = _asking_often(machine.plan())
        await machine.backend.apply([plan])
        await machine.until_ready(plan)
        (hung,) = machine.pids(plan)
        (supervisor,) = machine.backend.supervisors(plan.key)
        hang(hung)
        await machine.until(lambda: supervisor.phase == "loading" and not machine.ready(plan))
        assert supervisor.reason == "Unresponsive"
        words = "Unresponsive: did not answer /livez 2 times, 0.1 s apart; starting again"
        await machine.until(lambda: any(event.message.startswith(words) for event in machine.events))
        await machine.until_ready(plan)
        assert machine.pids(plan) != [hung]
        assert not psutil.pid_exists(hung)
    finally:
        await machine.backend.stop()


async def test_a_failed_reconciliation_is_logged_and_retried(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = machine.plan()
    await machine.backend.apply([plan])
    await machine.until_ready(plan)
    reconcile, failures = machine.backend._reconcile_deployment, [ValueError("broken once"), ValueError("and twice")]

    def fail_first(deployment: Any) -> None:
        if failures:
            raise failures.pop(0)
        reconcile(deployment)

    monkeypatch.setattr(machine.backend, "_reconcile_deployment", fail_first)
    os.kill(machine.pids(plan)[0], signal.SIGKILL)
    await machine.until(lambda: not failures)
    await machine.backend.apply([machine.plan(replicas=2)])
    await machine.until_ready(machine.plan(replicas=2))
    reported = [record for record in caplog.records if record.name == "pagemill.operator.local"]
    assert [str(record.exc_info[1]) for record in reported if record.exc_info] == ["broken once", "and twice"]


def _asking_often(plan: Plan, *, livez: int = 2) -> Plan:
    (group,) = plan.groups
    readiness, liveness = Probe(8001, "/readyz", 0.1, 1), Probe(8001, "/livez", 0.1, livez)
    process = replace(group.process, readiness=readiness, liveness=liveness)
    return replace(plan, groups=(replace(group, process=process),))


async def _traffic(
    session: aiohttp.ClientSession, machine: Machine, statuses: list[int], rolled: asyncio.Event
) -> None:
    while not rolled.is_set():
        statuses.append(await ask(session, machine))
        await asyncio.sleep(0.05)


def _rolled(machine: Machine, plan: Plan) -> bool:
    replicas = machine.backend.observe(plan.key).replicas
    wanted = [("ready", plan.groups[0].digest)] * plan.replicas
    return [(replica.phase, replica.digest) for replica in replicas] == wanted


def _forgotten(machine: Machine, plan: Plan) -> bool:
    try:
        machine.backend.observe(plan.key)
    except KeyError:
        return True
    return False


def _assert_private(folder: Path) -> None:
    (state,) = folder.iterdir()
    assert state.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o077 == 0 for file in state.iterdir())


def _listening_ports(pids: set[int]) -> set[int]:
    return {port for pid in pids for port in _listening_ports_of(pid)}


def _listening_ports_of(pid: int) -> set[int]:
    """Return the listening ports, or none of a process that has ended: engines start short-lived ones."""
    try:
        connections = psutil.Process(pid).net_connections("inet")
    except psutil.NoSuchProcess:
        return set()
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


async def test_every_replica_has_a_gpu_of_its_own(make_machine: Callable[..., Machine]) -> None:
    machine = make_machine(gpus=("3", "GPU-a1"))
    await machine.backend.start()
    try:
        plan = machine.plan(replicas=2, resources__gpus=1)
        with executed():  # the kernel shows the environment that a program was executed with
            await machine.backend.apply([plan])
            await machine.until_ready(plan)
        seen = [psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] for pid in machine.pids(plan)]
        assert sorted(seen) == ["3", "GPU-a1"]
    finally:
        await machine.backend.stop()
