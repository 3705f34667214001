"""Phases of cold starts, from a pod's conditions and its engine's report, once for each pod."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagemill_operator.controller.reporting.cold_starts import PHASES, ColdStarts, start_of
from pagemill_operator.controller.reporting.metrics import OperatorMetrics
from pagemill_protocol.report.load import EngineStart

Manifest = dict[str, Any]
KEY = "default/chat"
ENGINE = {"load": 3.5, "first_token": 0.25, "warm": 1.25}


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02}Z"


def pod(uid: str = "a", *, created: int = 0, ready: int | None = 12, restarts: int = 0) -> Manifest:
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at(created + 1)}]
    if ready is not None:
        conditions.append({"type": "Ready", "status": "True", "lastTransitionTime": at(ready)})
    container = {"name": "engine", "restartCount": restarts, "state": {"running": {"startedAt": at(created + 4)}}}
    return {
        "metadata": {"name": f"chat-{uid}", "uid": uid, "creationTimestamp": at(created)},
        "status": {"conditions": conditions, "containerStatuses": [container]},
    }


def test_the_phases_add_up_to_the_whole_start() -> None:
    start = start_of(pod(), "engine", ENGINE)
    assert start is not None
    assert (start.name, start.time) == ("chat-a", at(12))
    assert start.seconds == {
        "schedule": 1,
        "pull": 3,
        "boot": 3,
        "load": 3.5,
        "warm": 1.25,
        "first_token": 0.25,
        "total": 12,
    }
    assert tuple(start.seconds) == PHASES
    assert sum(seconds for phase, seconds in start.seconds.items() if phase != "total") == start.seconds["total"]


@pytest.mark.parametrize(
    "started",
    [pod(ready=None), pod(restarts=1), {**pod(), "status": {}}, {**pod(), "metadata": {"name": "x", "uid": "x"}}],
    ids=["not ready", "started again", "nothing reported", "without a time"],
)
def test_an_incomplete_start_is_ignored(started: Manifest) -> None:
    assert start_of(started, "engine", ENGINE) is None


def test_clocks_that_differ_give_no_negative_phase() -> None:
    start = start_of(pod(ready=3), "engine", ENGINE)
    assert start is not None
    assert (start.seconds["boot"], start.seconds["total"]) == (0, 3)


class World:
    def __init__(self) -> None:
        self.metrics = OperatorMetrics()
        self.reported: dict[str, EngineStart] = {}
        self.now = datetime(2026, 1, 1, 0, 0, 10, 500_000, tzinfo=UTC)
        self.starts = ColdStarts(lambda key: self.reported, self.metrics, now=lambda: self.now)
        self.starts.begin()

    def counts(self) -> dict[str, float]:
        families = text_string_to_metric_families(self.metrics.scrape().body.decode())
        samples = (sample for family in families for sample in family.samples)
        return {
            sample.labels["phase"]: sample.value
            for sample in samples
            if sample.name == "pagemill_cold_start_phase_seconds_count"
        }


def test_each_start_under_this_leader_counts_once_and_the_latest_is_shown() -> None:
    world = World()
    pods = [pod("old"), pod("a", created=20, ready=30), pod("b", created=20, ready=35)]
    assert world.starts.measure(KEY, pods) is None, "no engine has reported yet"
    world.reported = {"old": EngineStart("old", ENGINE), "b": EngineStart("b", ENGINE)}
    for _ in range(2):
        latest = world.starts.measure(KEY, pods)
        assert latest is not None
        assert latest.name == "chat-b"
    assert world.counts() == dict.fromkeys(PHASES, 1.0), (
        "a start before this leader's time belongs to the earlier leader"
    )
    world.reported |= {"a": EngineStart("a", ENGINE)}
    latest = world.starts.measure(KEY, pods)
    assert latest is not None
    assert latest.name == "chat-b", "the later start"
    assert world.counts() == dict.fromkeys(PHASES, 2.0)
    world.starts.forget(KEY)
    assert world.starts.measure(KEY, []) is None


def test_the_first_pod_of_a_leader_counts_although_a_status_was_due_only_after_its_creation() -> None:
    world = World()
    world.now += timedelta(seconds=30)
    world.reported = {"a": EngineStart("a", ENGINE)}
    latest = world.starts.measure(KEY, [pod(created=10, ready=25)])
    assert latest is not None, "a pod of the second in which the leadership began"
    assert latest.name == "chat-a"


def test_each_wake_counts_once_and_not_as_a_second_start() -> None:
    world = World()
    pods = [pod("old"), pod("new", created=20, ready=40)]

    def reported(num_wakes: int) -> dict[str, EngineStart]:
        return {uid: EngineStart(uid, {**ENGINE, "wake": 0.25}, num_wakes) for uid in ("old", "new")}

    world.reported = reported(1)
    for _ in range(2):
        world.starts.measure(KEY, pods)
        assert world.counts() == {"wake": 1.0}, "the older pod woke under the earlier leader"
    world.reported = reported(3)
    world.starts.measure(KEY, pods)
    world.reported = {}
    world.starts.measure(KEY, pods)
    world.reported = reported(3)
    world.starts.measure(KEY, pods)
    assert world.counts() == {"wake": 3.0}
