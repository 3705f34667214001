"""The bench of normal days finds no alarm in calm traffic, and one in an overload."""

from __future__ import annotations

import normal_day
import pytest
from prometheus import program

from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.workloads.shapes import Steady

pytestmark = pytest.mark.full


@pytest.mark.parametrize(("rate", "fires"), [(1.0, False), (60.0, True)])
def test_only_an_overload_raises_an_alarm(monkeypatch: pytest.MonkeyPatch, rate: float, fires: bool) -> None:
    program("promtool")
    monkeypatch.setattr(normal_day, "MAX_REPLICAS", 1)
    scraped = normal_day.Scraped(1)
    settings = FleetSettings(engine=normal_day.ENGINE, bounds=ReplicaBounds(1, 1))
    workload = Steady(rate=rate, duration_s=360.0).workload(1)
    simulate_fleet(workload, settings, scraped, fast=True, on_end=scraped.ended)
    assert bool(normal_day.false_alarms(scraped, 360.0)) == fires
