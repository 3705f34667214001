"""Rows of the fault matrix as real objects: what is applied, and which condition, reason and remedy must come of it."""

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
"""From the news to the status, with all rows at once on two cores; news of children settle for 1 to 3 s of it."""


@dataclass(frozen=True)
class Row:
    name: str
    reason: str
    stage: str
    """The condition that is False with this reason, beside Ready."""
    remedy: str
    """Part of the message."""
    document: Document


def row(name: str, reason: str, stage: str, remedy: str, **sections: Any) -> Row:
    return Row(name, reason, stage, remedy, llmdeployment(name, **sections))


def container(**fields: Any) -> Document:
    """`template` that changes the engine's container."""
    return pod(containers=[{"name": "engine", "resources": SHARED_CORES, **fields}])


def pod(**fields: Any) -> Document:
    """`template` that changes the pod."""
    return {"spec": fields}


def assert_reported(deployed: Deployed, row: Row, timeout_s: float) -> None:
    """Until Ready names the reason; then everything else must agree with it."""
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
    """Every row was reported one reconcile after it showed; those in `patience_s` by name, one after that long."""
    lags = {row.name: story.lag_s(row.name, row.reason, is_own_fault=row.stage == "Planned") for row in rows}
    late = {name: lag for name, lag in lags.items() if lag > ONE_RECONCILE_S + patience_s.get(name, 0.0)}
    assert not late, f"reported late, in seconds: {late}; all: {lags}"


def warnings(deployed: Deployed) -> Counter[str]:
    """How many Event objects tell of each reason; repeats are counted inside one."""
    selector = f"involvedObject.kind=LLMDeployment,involvedObject.name={deployed.name},type=Warning"
    return Counter(event["reason"] for event in deployed.kubectl.items("events", f"--field-selector={selector}"))
