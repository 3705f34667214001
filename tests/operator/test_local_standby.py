"""Standby replicas on this machine: a real gateway and engine processes with a simulated device, which sleep."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from waiting import eventually

Machine = Any


async def ask(session: aiohttp.ClientSession, base_url: str, max_tokens: int = 4) -> tuple[int, bytes]:
    """Return status and body once the gateway knows the name, a moment after it was applied."""
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, "stream": True}

    async def answer() -> tuple[int, bytes] | None:
        async with session.post(f"{base_url}/v1/chat/completions", json=body) as response:
            return (response.status, await response.read()) if response.status != 404 else None

    return await eventually(answer, every_s=0.05)


def phases(machine: Machine, plan: Any) -> list[str]:
    return sorted(replica.phase for replica in machine.backend.observe(plan.key).replicas if replica.live)


@pytest.mark.slow
async def test_at_zero_one_engine_sleeps_and_the_same_process_answers_the_next_request(machine: Machine) -> None:
    autoscaling = {"minReplicas": 0, "maxReplicas": 1, "warm": 1, "scaleToZeroAfter": "2s"}
    plan = machine.plan(replicas=0, autoscaling=autoscaling)
    await machine.backend.apply([plan])
    await machine.until(lambda: phases(machine, plan) == ["asleep"])
    await machine.until(lambda: machine.backend.observe(plan.key).gateway_ready)
    pids = machine.pids(plan)
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            status, body = await ask(session, machine.backend.base_url)
            assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True), body[-2000:]
            await machine.until(lambda: phases(machine, plan) == ["asleep"])
    assert machine.pids(plan) == pids, "the process must not be restarted"
    findings = {finding.type: finding for finding in machine.findings(plan)}
    assert (findings["Ready"].reason, findings["ModelLoaded"].status) == ("ScaledToZero", "True")
    assert findings["Ready"].message == "there are no requests; the next one wakes a replica"


@pytest.mark.full
async def test_after_a_wake_another_replica_becomes_the_standby(machine: Machine) -> None:
    autoscaling = {"minReplicas": 1, "maxReplicas": 3, "warm": 1, "targets": {"queueDepth": 1}}
    plan = machine.plan(autoscaling=autoscaling, engine__maxNumSeqs=1)
    await machine.backend.apply([plan])
    await machine.until(lambda: phases(machine, plan) == ["asleep", "ready"])
    await machine.until(lambda: machine.backend.observe(plan.key).gateway_ready)
    first = set(machine.pids(plan))
    async with aiohttp.ClientSession() as session:
        await ask(session, machine.backend.base_url)
        answers = await machine.during(
            lambda: phases(machine, plan).count("ready") >= 2,
            *(ask(session, machine.backend.base_url, 400) for _ in range(12)),
        )
    assert [status for status, _ in answers] == [200] * 12
    assert all(body.endswith(b"data: [DONE]\n\n") for _, body in answers)
    assert first <= set(machine.pids(plan)), "the replica that slept must serve, and none may be removed"
    wanted = machine.backend.observe(plan.key).plan.replicas
    assert 2 <= wanted <= 3
    await machine.until(lambda: phases(machine, plan) == ["asleep"] * min(1, 3 - wanted) + ["ready"] * wanted)


async def test_the_standby_replaces_an_engine_that_crashes(machine: Machine) -> None:
    plan = machine.plan(autoscaling={"minReplicas": 1, "maxReplicas": 2, "warm": 1})
    await machine.backend.apply([plan])
    await machine.until(lambda: phases(machine, plan) == ["asleep", "ready"])
    before = {replica.name: replica.phase for replica in machine.backend.observe(plan.key).replicas}
    (serving,) = (each for each in machine.backend.supervisors(plan.key) if before[each.name] == "ready")
    (sleeping,) = (each for each in machine.backend.supervisors(plan.key) if before[each.name] == "asleep")
    machine.kill(serving)
    await machine.until(lambda: sleeping.phase == "ready")
    await machine.until(lambda: phases(machine, plan) == ["asleep", "ready"])
    assert sleeping.phase == "ready", "the woken replica keeps serving, and the restarted one becomes the standby"
