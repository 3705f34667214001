"""Computes the least cost of a schedule of replicas: its orders on the simulated cluster, without requests.

A removed pod goes at once, and none stays for work that is left when the traffic ends; everything else is the cluster
of a simulation with requests. `trials` uses it to skip schedules that cost too much.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagemill_protocol.report.load import EngineReport
from pagemill_simulator.bounds.schedule import GRID_S, Schedule
from pagemill_simulator.events import Events
from pagemill_simulator.fleet.event_log import EventLog
from pagemill_simulator.fleet.platform import Platform, Pod
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.workloads.request import Workload


def least_pod_seconds(schedule: Schedule, settings: FleetSettings, duration_s: float) -> float:
    """Return the pod-seconds until the end of the traffic."""
    events, engines = Events(), _NoEngines()
    event_log = EventLog(Workload(name="nothing", source="", requests=(), duration_s=duration_s))
    engines.platform = platform = Platform(events, settings, engines, event_log)
    low, high = settings.bounds

    def order() -> None:
        events.after(GRID_S, order)
        platform.order(max(low, min(high, schedule.at(events.now_s))))

    platform.begin()
    events.after(GRID_S, order)
    while (due_s := events.next_s) is not None and due_s < duration_s:
        events.step()
    events.now_s = duration_s
    platform.end()
    return event_log.pod_seconds


class _NoEngines:
    """Implements `platform.Engines` with pods in which nothing runs."""

    platform: Platform

    def listed(self) -> None:
        pass

    def ready(self, pod: Pod) -> None:
        pass

    def crashed(self, pod: Pod) -> None:
        pass

    def drains(self, pod: Pod) -> None:
        self.platform.emptied(pod)

    def gone(self, pod: Pod) -> None:
        pass

    def held(self) -> Mapping[str, EngineReport]:
        return {}

    def num_in_system(self) -> int:
        return 0
