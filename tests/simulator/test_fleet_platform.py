"""The simulated cluster: starts have phases, pods cost from their scheduling on, and the right pods are removed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from engine_reports import reported

from pagemill_engine.config import EngineConfig
from pagemill_protocol.report.load import EngineReport
from pagemill_simulator.events import Events
from pagemill_simulator.fleet.event_log import EventLog, count_flaps
from pagemill_simulator.fleet.outcome import FleetOutcome, Served
from pagemill_simulator.fleet.platform import Platform, Pod
from pagemill_simulator.fleet.settings import ColdStart, FleetSettings, FleetSettingsError
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.workloads.request import SimRequest, Workload

COLD_START = ColdStart(schedule_s=1.0, pull_s=2.0, load_s=10.0, warm_s=3.0, spread=0.0)
ENGINE = EngineConfig(model="sim")


class Engines:
    """Engines whose load the test sets and which record the orders."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.reported: list[tuple[float, str, str]] = []
        self.holding: dict[str, int] = {}

    def listed(self) -> None:
        pass

    def ready(self, pod: Pod) -> None:
        self.reported.append((self.events.now_s, "ready", pod.name))

    def crashed(self, pod: Pod) -> None:
        self.reported.append((self.events.now_s, "crashed", pod.name))

    def drains(self, pod: Pod) -> None:
        self.reported.append((self.events.now_s, "drains", pod.name))

    def gone(self, pod: Pod) -> None:
        self.reported.append((self.events.now_s, "gone", pod.name))

    def held(self) -> Mapping[str, EngineReport]:
        return {name: reported(name, blocks, 1) for name, blocks in self.holding.items()}

    def num_in_system(self) -> int:
        return 0


class Cluster:
    def __init__(self, **settings: object) -> None:
        self.events = Events()
        self.engines = Engines(self.events)
        self.event_log = EventLog(Workload(name="one", source="test", requests=[SimRequest(0, 1, 1)], duration_s=1))
        chosen = {"bounds": ReplicaBounds(0, 10), "cold_start": COLD_START, **settings}
        self.platform = Platform(
            self.events, FleetSettings(engine=ENGINE, **chosen).checked(), self.engines, self.event_log
        )
        self.platform.begin()

    def until(self, instant_s: float) -> None:
        done: list[bool] = []
        self.events.at(instant_s, lambda: done.append(True))
        while not done:
            self.events.step()

    def outcome(self) -> FleetOutcome:
        self.platform.end()
        self.event_log.ended(0, Served(0.0, 1, 1, "served", 1.0, None))
        return self.event_log.outcome("test", self.events.now_s, is_exact=True)


def phases(cluster: Cluster) -> list[str]:
    return [pod.phase for pod in cluster.platform.pods.values()]


def test_a_start_has_its_phases_and_costs_from_its_scheduling_on() -> None:
    cluster = Cluster()
    cluster.platform.order(1)
    seen = []
    for instant_s in (0.5, 1.5, 3.5, 15.5, 16.5):
        cluster.until(instant_s)
        seen += phases(cluster)
    assert seen == ["pending", "starting", "loading", "loading", "ready"]
    assert cluster.engines.reported == [(16.0, "ready", "pod-0")]
    cluster.until(21.0)
    assert cluster.outcome().pod_seconds == pytest.approx(20.0)


def test_the_initial_replicas_are_ready_from_the_start() -> None:
    cluster = Cluster(start_replicas=3)
    assert phases(cluster) == ["ready"] * 3
    cluster.until(10.0)
    outcome = cluster.outcome()
    assert outcome.pod_seconds == pytest.approx(30.0)
    assert outcome.num_scale_ups == 0


def test_an_unready_pod_is_removed_first_and_at_once() -> None:
    cluster = Cluster(start_replicas=1)
    cluster.platform.order(3)
    cluster.until(5.0)
    cluster.platform.order(1)
    assert list(cluster.platform.pods) == ["pod-0"]
    cluster.until(100.0)
    assert phases(cluster) == ["ready"]
    assert cluster.outcome().pod_seconds == pytest.approx(100.0 + 2 * 4.0)


def test_of_ready_pods_the_emptiest_is_removed_once_it_is_empty() -> None:
    cluster = Cluster(start_replicas=3)
    cluster.engines.holding = {"pod-0": 5, "pod-1": 2, "pod-2": 9}
    cluster.platform.order(2)
    assert phases(cluster) == ["ready", "draining", "ready"]
    cluster.until(7.0)
    cluster.platform.emptied(cluster.platform.pods["pod-1"])
    assert list(cluster.platform.pods) == ["pod-0", "pod-2"]
    assert ("drains", "pod-1") in {each[1:] for each in cluster.engines.reported}
    assert cluster.outcome().pod_seconds == pytest.approx(3 * 7.0)


def test_a_drain_ends_after_its_time_limit() -> None:
    cluster = Cluster(start_replicas=2, drain_timeout_s=30.0)
    cluster.platform.order(1)
    cluster.until(29.0)
    assert sorted(phases(cluster)) == ["draining", "ready"]
    cluster.until(31.0)
    assert phases(cluster) == ["ready"]
    assert cluster.engines.reported[-1][:2] == (30.0, "gone")


def test_a_crashed_pod_stays_scheduled_and_returns_after_loading() -> None:
    cluster = Cluster(start_replicas=1, crash_mean_s=1000.0, seed=3)
    while not any(event == "crashed" for _, event, _ in cluster.engines.reported):
        cluster.events.step()
    crashed_s = cluster.events.now_s
    assert phases(cluster) == ["loading"]
    cluster.until(crashed_s + 13.5)
    assert cluster.engines.reported[-1] == (pytest.approx(crashed_s + 13.0), "ready", "pod-0")
    assert cluster.outcome().pod_seconds == pytest.approx(crashed_s + 13.5)


def test_start_times_are_learned_like_in_the_operator() -> None:
    cluster = Cluster()
    assert cluster.platform.fleet([]).cold_start_s is None
    cluster.platform.order(2)
    for instant_s in range(20):
        cluster.until(float(instant_s))
        fleet = cluster.platform.fleet([])
    assert fleet.cold_start_s == pytest.approx(16.0, abs=1.0)
    assert (fleet.wanted, fleet.ready, fleet.starting) == (2, 2, 0)


def test_random_times_depend_only_on_the_seed_and_the_pod() -> None:
    spread = ColdStart(spread=0.3)
    assert spread.draw(1, 5) == spread.draw(1, 5)
    assert len({spread.draw(1, 5), spread.draw(2, 5), spread.draw(1, 6), spread.draw(1, 5, start=1)}) == 4


def test_changes_that_are_soon_reverted_count_as_flaps() -> None:
    assert count_flaps([(0.0, 1), (100.0, -1), (200.0, 1)]) == 2
    assert count_flaps([(0.0, 1), (100.0, 2), (401.0, -1)]) == 0
    assert count_flaps([]) == 0


def test_a_request_ends_exactly_once() -> None:
    event_log = EventLog(Workload(name="two", source="", requests=[SimRequest(0, 1, 1)] * 2, duration_s=1))
    served = Served(0.0, 1, 1, "served", 1.0, None)
    event_log.ended(1, served)
    with pytest.raises(RuntimeError, match="request 1 ended twice"):
        event_log.ended(1, served)
    with pytest.raises(RuntimeError, match="1 requests never ended"):
        event_log.outcome("test", 1.0, is_exact=True)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"bounds": ReplicaBounds(3, 2)}, "bounds: 3 to 2 replicas"),
        ({"bounds": ReplicaBounds(0, 0)}, "bounds: 0 to 0 replicas"),
        ({"start_replicas": 11}, "start_replicas: 11 is not between 0 and 10"),
        ({"crash_mean_s": float("nan")}, "crash_mean_s: nan"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s: -1.0"),
        ({"cold_start": ColdStart(load_s=float("inf"))}, "cold_start.load_s: inf"),
        ({"max_attempts": 0}, "max_attempts: 0"),
    ],
)
def test_invalid_settings_are_named(wrong: dict[str, object], words: str) -> None:
    settings = FleetSettings(engine=ENGINE, **{"bounds": ReplicaBounds(0, 10), **wrong})
    with pytest.raises(FleetSettingsError, match=words):
        settings.checked()
