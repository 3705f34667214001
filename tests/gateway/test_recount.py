"""A new brain admits no request before all workers have reported their reservations, unless a worker is gone."""

from __future__ import annotations

import asyncio

import pytest
from waiting import WAIT_LIMIT_S

from pagemill_gateway import control_process
from pagemill_gateway.control_process import Recount


async def test_the_first_brain_of_a_gateway_waits_for_no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_process, "RECOUNT_TIMEOUT_S", 3600)
    await asyncio.wait_for(Recount(0).done(), WAIT_LIMIT_S)


async def test_requests_wait_for_the_reports_of_every_worker() -> None:
    count = Recount(2)
    asking = [asyncio.create_task(count.done()) for _ in range(3)]
    count.reported_by("one")
    count.reported_by("one")
    await asyncio.sleep(0)
    assert not any(task.done() for task in asking)
    count.reported_by("two")
    await asyncio.gather(*asking)


async def test_a_worker_that_does_not_report_delays_a_start_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_process, "RECOUNT_TIMEOUT_S", 0.05)
    count = Recount(2)
    count.reported_by("one")
    await count.done()
    monkeypatch.setattr(control_process, "RECOUNT_TIMEOUT_S", 3600)
    await asyncio.wait_for(count.done(), WAIT_LIMIT_S)
