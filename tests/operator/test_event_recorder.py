"""Events of deployments: one object for each kind of event, counted repeats, and a bounded rate."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from hand_clock import Clock

from pagemill_kube.errors import ApiError, Unreachable
from pagemill_operator.controller.reporting.events import MAX_KINDS, QUIET_S, EventRecorder

OWNER = {"metadata": {"name": "chat", "namespace": "default", "uid": "u1", "resourceVersion": "5"}}


class FakeEvents:
    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.num_writes = 0
        self.error: Exception | None = None

    async def create(self, kind: Any, manifest: dict[str, Any]) -> None:
        self._count()
        assert manifest["metadata"]["name"] not in self.events
        self.events[manifest["metadata"]["name"]] = manifest

    async def merge(self, kind: Any, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        self._count()
        if name not in self.events:
            raise ApiError(404, "NotFound", "it has expired")
        self.events[name] |= patch

    def _count(self) -> None:
        self.num_writes += 1
        if self.error:
            raise self.error

    @property
    def only(self) -> dict[str, Any]:
        (event,) = self.events.values()
        return event


@pytest.fixture
def api() -> FakeEvents:
    return FakeEvents()


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def recorder(api: FakeEvents, clock: Clock) -> EventRecorder:
    client: Any = api
    return EventRecorder(client, "operator-1", clock=clock, now=lambda: datetime.fromtimestamp(clock.now, UTC))


async def test_an_event_refers_to_its_deployment(recorder: EventRecorder, api: FakeEvents) -> None:
    await recorder.record(OWNER, "Normal", "Ready", "2 of 2 replicas are ready")
    assert api.only["involvedObject"]["uid"] == "u1"
    assert api.only["involvedObject"]["kind"] == "LLMDeployment"
    assert (api.only["type"], api.only["reason"], api.only["count"]) == ("Normal", "Ready", 1)
    assert api.only["reportingInstance"] == "operator-1"


async def test_repeats_are_counted_on_one_event_and_written_rarely(
    recorder: EventRecorder, api: FakeEvents, clock: Clock
) -> None:
    for second in range(100):
        clock.now = float(second)
        await recorder.record(OWNER, "Warning", "CrashLoop", f"crash {second}")
    assert api.num_writes == 2
    assert api.only["count"] == QUIET_S + 1
    assert api.only["message"] == "crash 60"
    clock.now = 1000.0
    await recorder.record(OWNER, "Warning", "CrashLoop", "again")
    assert api.only["count"] == 101
    assert api.only["lastTimestamp"] == "1970-01-01T00:16:40Z"
    assert api.only["firstTimestamp"] == "1970-01-01T00:00:00Z"


async def test_other_reasons_and_other_objects_have_their_own_events(recorder: EventRecorder, api: FakeEvents) -> None:
    await recorder.record(OWNER, "Warning", "CrashLoop", "m")
    await recorder.record(OWNER, "Warning", "ImageNotFound", "m")
    namesake = {"metadata": {**OWNER["metadata"], "uid": "u2"}}
    await recorder.record(namesake, "Warning", "CrashLoop", "m")
    assert len(api.events) == 3


async def test_an_expired_event_is_created_again(recorder: EventRecorder, api: FakeEvents, clock: Clock) -> None:
    await recorder.record(OWNER, "Warning", "CrashLoop", "m")
    api.events.clear()
    clock.now = QUIET_S
    await recorder.record(OWNER, "Warning", "CrashLoop", "m")
    assert api.only["count"] == 1


@pytest.mark.parametrize("error", [ApiError(403, "Forbidden", "no"), Unreachable("away")])
async def test_a_failed_write_of_an_event_affects_nothing(
    recorder: EventRecorder, api: FakeEvents, error: Exception
) -> None:
    api.error = error
    await recorder.record(OWNER, "Warning", "CrashLoop", "m")
    assert api.events == {}


async def test_the_number_of_remembered_events_is_bounded(recorder: EventRecorder) -> None:
    for number in range(MAX_KINDS + 10):
        await recorder.record(OWNER, "Warning", f"Reason{number}", "m")
    assert len(recorder._series) == MAX_KINDS


async def test_every_decision_is_an_event_of_its_own(recorder: EventRecorder, api: FakeEvents) -> None:
    for message in ("from 1 to 3 replicas", "from 3 to 5 replicas", "from 3 to 5 replicas"):
        await recorder.record(OWNER, "Normal", "Scaled", message)
    assert [event["message"] for event in api.events.values()] == ["from 1 to 3 replicas", "from 3 to 5 replicas"]
    assert {event["reason"] for event in api.events.values()} == {"Scaled"}
