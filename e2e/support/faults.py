"""Rows of the fault matrix as real objects: what is applied, and which condition, reason and remedy must follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from support.deployments import Deployed
from support.objects import SHARED_CORES, Document, llmdeployment
from support.story import Story
from support.waiting import until

ONE_RECONCILE_S = 10.0
"""Time limit from a change to the status, with all rows at once on two cores; 1 to 3 s of it wait for further changes.
"""

IMAGE_TAG = "THE-TAG"
"""Stands in documents of rows for the tag of the images."""


@dataclass(frozen=True)
class Row:
    name: str
    reason: str
    stage: str
    """The condition, besides Ready, that is False with this reason."""
    remedy: str
    """A part of the message."""
    document: Document


def row(name: str, reason: str, stage: str, remedy: str, **sections: Any) -> Row:
    return Row(name, reason, stage, remedy, llmdeployment(name, **sections))


def container(**fields: Any) -> Document:
    """Return a `template` that changes the engine's container."""
    return pod(containers=[{"name": "engine", "resources": SHARED_CORES, **fields}])


def pod(**fields: Any) -> Document:
    """Return a `template` that changes the pod."""
    return {"spec": fields}


def assert_reported(deployed: Deployed, row: Row, timeout_s: float) -> None:
    """Wait until Ready has the reason; then check the other conditions, the observed generation and the event."""
    ready = deployed.wait_reason("Ready", row.reason, timeout_s)
    found = deployed.get()
    conditions = {each["type"]: each for each in found["status"]["conditions"]}
    assert ready["status"] == "False", ready
    assert row.remedy in ready["message"], ready
    assert conditions[row.stage]["status"] == "False", conditions
    assert conditions[row.stage]["reason"] == row.reason, conditions
    generation = found["metadata"]["generation"]
    assert {each["observedGeneration"] for each in conditions.values()} == {generation}
    assert found["status"]["observedGeneration"] == generation
    until(f"an event reports {row.reason}", lambda: row.reason in warnings(deployed), timeout_s=20)


def assert_prompt(story: Story, rows: Iterable[Row], patience_s: Mapping[str, float]) -> None:
    """Check that each row was reported within one reconcile of its fault, plus `patience_s` of its name."""
    lags = {row.name: story.lag_s(row.name, row.reason, is_own_fault=row.stage == "Planned") for row in rows}
    late = {name: lag for name, lag in lags.items() if lag > ONE_RECONCILE_S + patience_s.get(name, 0.0)}
    assert not late, f"reported late, in seconds: {late}; all: {lags}"


def warnings(deployed: Deployed) -> Counter[str]:
    """Return the number of Event objects by reason; an object counts its own repeats."""
    selector = f"involvedObject.kind=LLMDeployment,involvedObject.name={deployed.name},type=Warning"
    return Counter(event["reason"] for event in deployed.kubectl.items("events", f"--field-selector={selector}"))
