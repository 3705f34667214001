"""Replicas on this machine follow the load: a real gateway and engine processes with a simulated device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from waiting import eventually

pytestmark = pytest.mark.slow

Machine = Any


Answer = tuple[int, bytes]


async def ask(session: aiohttp.ClientSession, base_url: str, max_tokens: int = 4, token: str = "") -> Answer:
    """Request this number of tokens; a simulated engine samples all tokens, including the end token."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "chat", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with session.post(f"{base_url}/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.read()


def wanted(machine: Machine, plan: Any) -> int:
    return int(machine.backend.observe(plan.key).plan.replicas)


async def test_scaling_from_zero_to_an_answer_and_back_twice(machine: Machine) -> None:
    autoscaling = {"minReplicas": 0, "maxReplicas": 2, "scaleToZeroAfter": "2s"}
    plan = machine.plan(replicas=0, autoscaling=autoscaling)
    await machine.backend.apply([plan])
    await machine.until(lambda: machine.backend.gateway.ready)
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            assert machine.pids(plan) == []
            status, body = await answered(session, machine)
            assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
            await machine.until(lambda: not machine.backend.supervisors(plan.key))
            assert wanted(machine, plan) == 0
    reported = [event.message for event in machine.events if event.subject == "chat"]
    changes = [message.partition(":")[0] for message in reported]
    # A machine on which reports of running requests come late may put an engine to rest once more.
    num_times = len(changes) // 2
    assert 2 <= num_times <= 4
    assert changes == ["scaled to 1 replicas from 0", "scaled to 0 replicas from 1"] * num_times


async def answered(session: aiohttp.ClientSession, machine: Machine) -> Answer:
    """Return the answer once the gateway knows the deployment, a moment after it was applied."""

    async def answer() -> Answer | None:
        status, body = await ask(session, machine.backend.base_url)
        return (status, body) if status != 404 else None

    return await eventually(answer, every_s=0.05)


async def page_decisions(session: aiohttp.ClientSession, machine: Machine) -> list[dict[str, Any]]:
    """Return the decisions that the gateway's page shows, once it shows any."""

    async def shown() -> list[dict[str, Any]]:
        async with session.get(f"{machine.backend.base_url}/ui/scaling") as response:
            found: list[dict[str, Any]] = (await response.json())["decisions"]
            return found

    return await eventually(shown, every_s=0.05)


@pytest.mark.parametrize("policy", ["Demand", pytest.param("TargetTracking", marks=pytest.mark.full)])
async def test_waiting_requests_add_engines_and_all_are_served(machine: Machine, policy: str) -> None:
    autoscaling = {"maxReplicas": 2, "targets": {"queueDepth": 1}, "policy": policy}
    plan = machine.plan(autoscaling=autoscaling, engine__maxNumSeqs=1)
    await machine.backend.apply([plan])
    await machine.until_ready(plan)
    async with aiohttp.ClientSession() as session:
        await answered(session, machine)
        asking = [asyncio.create_task(ask(session, machine.backend.base_url, 200)) for _ in range(12)]
        await machine.until(lambda: wanted(machine, plan) == 2)
        await machine.until(lambda: len(machine.backend.observe(plan.key).ready()) == 2)
        answers = await asyncio.gather(*asking)
        shown = await page_decisions(session, machine)
    assert ("default/chat", 1, 2, "ScaledUp") in [
        (each["key"], each["replicas_before"], each["replicas"], each["reason"]) for each in shown
    ]
    assert all(each["message"] for each in shown)
    assert [status for status, _ in answers] == [200] * 12
    assert all(body.endswith(b"data: [DONE]\n\n") for _, body in answers)


@pytest.mark.parametrize("mode", ["Advisory", "External"])
async def test_in_modes_advisory_and_external_the_number_does_not_change(machine: Machine, mode: str) -> None:
    plan = machine.plan(replicas=0, autoscaling={"mode": mode, "maxReplicas": 2, "minReplicas": 1})
    await machine.backend.apply([plan])
    await machine.until(lambda: machine.backend.gateway.ready)
    if mode == "Advisory":
        await machine.until(lambda: any("would be scaled to 1" in event.message for event in machine.events))
    assert wanted(machine, plan) == 0


async def test_a_plan_without_autoscaling_returns_to_its_number(
    make_machine: Callable[..., Machine],
) -> None:
    machine = make_machine()
    await machine.backend.start()
    try:
        plan = machine.plan(replicas=0, autoscaling={"maxReplicas": 2, "minReplicas": 1})
        await machine.backend.apply([plan])
        await machine.until(lambda: len(machine.backend.supervisors(plan.key)) == 1)
        await machine.backend.apply([machine.plan(replicas=0)])
        await machine.until(lambda: not machine.backend.supervisors(plan.key))
    finally:
        await machine.backend.stop()


def holding(machine: Machine, plan: Any) -> set[str]:
    """Return the replicas that have a request, as the gateway reports."""
    held = machine.backend._held(machine.backend._deployments[plan.key])
    return {name for name, engine in held.items() if engine.num_requests}


async def storage_forms(machine: Machine, plan: Any, num_replicas: int, asking: asyncio.Task[Answer]) -> set[str]:
    """Wait until this number of replicas has a request; return them while it is being answered."""

    def held() -> set[str] | None:
        assert not asking.done(), asking.result()
        names = holding(machine, plan)
        return names if len(names) == num_replicas else None

    return await eventually(held, progress=lambda: holding(machine, plan))


async def test_of_two_replicas_the_idle_one_is_removed(machine: Machine) -> None:
    def planned(replicas: int) -> Any:
        return machine.plan(replicas=replicas, engine__maxModelLen=4096)

    plan = planned(2)
    await machine.backend.apply([plan])
    await machine.until_ready(plan)
    youngest = machine.backend.supervisors(plan.key)[-1]
    assert youngest.launch is not None
    async with aiohttp.ClientSession() as session:
        # Bypass the gateway, which would choose the engine itself; the engine reports the request to it.
        token = machine.backend._deployments[plan.key].token
        asking = asyncio.create_task(ask(session, youngest.launch.data_url, 4000, token))
        try:
            assert await storage_forms(machine, plan, 1, asking) == {youngest.name}
            await machine.backend.apply([planned(1)])
            await machine.until(lambda: len(machine.backend.supervisors(plan.key)) == 1)
            assert not asking.done(), asking.result()
            assert machine.backend.supervisors(plan.key) == [youngest], (
                "if both were idle, this replica would be removed"
            )
        finally:
            asking.cancel()
            await asyncio.wait([asking])


async def test_an_engine_that_is_ready_refuses_no_request_before_the_gateway_knows_it(
    machine: Machine,
) -> None:
    plan = machine.plan(replicas=1)
    await machine.backend.apply([plan])
    await machine.until_ready(plan)
    (endpoint,) = (each.endpoint for each in machine.backend._deployments[plan.key].replicas)
    assert endpoint is not None
    assert endpoint.probed_ready
    async with aiohttp.ClientSession() as session:
        status, body = await answered(session, machine)
    assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
