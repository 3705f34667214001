"""Builds the whole `status` of an `LLMDeployment` as JSON; it equals the present status while nothing has changed."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from pagemill_crds.status import LLMDeploymentStatus, LoadSummary, PlanSummary, Start
from pagemill_operator.backends.base import FORMER_NAME_S
from pagemill_operator.backends.kubernetes.render.names import pod_template, selector_text, workload_at
from pagemill_operator.backends.kubernetes.snapshot import Snapshot
from pagemill_operator.plan.types import Plan
from pagemill_operator.status.conditions import find_conditions, merge_conditions
from pagemill_operator.status.load import next_load, remaining_s, summarize
from pagemill_operator.status.observation import Observation

MAX_NOTES, MAX_ADAPTERS = 32, 1024


def status_body(snapshot: Snapshot, observation: Observation, url: str, now: str) -> dict[str, Any]:
    """Return the status. `now` is an RFC 3339 time; it appears only beside values that change with this body."""
    old = _old_status(snapshot)
    plan = observation.plan
    desired = plan.replicas if plan else old.desired_replicas
    num_live = sum(replica.live for replica in observation.replicas)
    body: dict[str, Any] = {
        "observedGeneration": snapshot.generation,
        "replicas": num_live,
        "desiredReplicas": desired,
        "readyReplicas": len(observation.ready()),
        "standbyReplicas": len(observation.asleep()),
        "selector": selector_text(snapshot.name),
        "url": url,
        "plan": _plan_summary(snapshot, observation, plan, old.plan, now) if plan else _json(old.plan),
        "adapters": _adapters(snapshot) or None,
        "load": _json(next_load(old.load, _measured(snapshot, now))),
        "lastScaling": _last_scaling(old, desired, now, _scaling_reason(observation)),
        "lastStart": _last_start(old, observation),
        "conditions": [
            _json(condition)
            for condition in merge_conditions(old.conditions, find_conditions(observation), snapshot.generation, now)
        ],
    }
    return {name: value for name, value in body.items() if value not in (None, "")}


def _old_status(snapshot: Snapshot) -> LLMDeploymentStatus:
    """Return the present status, or an empty one if another version wrote what this version cannot read."""
    try:
        return LLMDeploymentStatus.model_validate(snapshot.owner.get("status") or {})
    except ValidationError:
        return LLMDeploymentStatus()


def _adapters(snapshot: Snapshot) -> list[dict[str, Any]]:
    shown = [each.model_dump(mode="json", by_alias=True, exclude_defaults=True) for each in snapshot.adapters]
    return sorted(shown, key=lambda each: str(each["name"]))[:MAX_ADAPTERS]


def _former_name(old: PlanSummary | None, name: str, is_replaced: bool, now: str) -> dict[str, Any]:
    """Return the fields of the name before the latest change, which gateways serve beside the new one for a while.

    `is_replaced`: whether replicas of an earlier spec are left.
    """
    if old is None:
        return {}
    if old.model_name not in ("", name):
        until = datetime.fromisoformat(now) + timedelta(seconds=FORMER_NAME_S)
        return {"formerName": old.model_name, "formerUntil": until.strftime("%Y-%m-%dT%H:%M:%SZ")}
    if not old.former_until or (not is_replaced and _seconds_until(old.former_until, now) <= 0):
        return {}
    return {"formerName": old.former_name, "formerUntil": old.former_until}


def _plan_summary(
    snapshot: Snapshot, observation: Observation, plan: Plan, old: PlanSummary | None, now: str
) -> dict[str, Any]:
    group = plan.groups[0]
    return {
        "modelName": plan.model_name,
        **_former_name(old, plan.model_name, bool(observation.older()), now),
        "digest": group.digest,
        "engineVersion": _engine_version(snapshot, plan),
        "podsPerReplica": group.pods_per_replica,
        "notes": [str(note) for note in plan.notes[:MAX_NOTES]],
    }


def _engine_version(snapshot: Snapshot, plan: Plan) -> str:
    """Return the tag of the engines' image, or "" if it has none."""
    workload = snapshot.child(*workload_at(plan))
    containers = pod_template(workload)["spec"]["containers"] if workload else []
    image = next((str(container.get("image", "")) for container in containers if container["name"] == "engine"), "")
    match = re.search(r":([^:/@]+)(@|$)", image)
    return match[1] if match else ""


def status_wait_s(snapshot: Snapshot, now: str) -> float | None:
    """Return the seconds until the status may change by itself: it may show the measured load, or a former name ends.
    None: it does not."""
    old = _old_status(snapshot)
    until = old.plan.former_until if old.plan is not None else None
    name_s = max(0.0, _seconds_until(until, now)) if until else 0.0
    waits = [each for each in (remaining_s(old.load, _measured(snapshot, now)), name_s or None) if each is not None]
    return min(waits, default=None)


def _seconds_until(time: str, now: str) -> float:
    return (datetime.fromisoformat(time) - datetime.fromisoformat(now)).total_seconds()


def _measured(snapshot: Snapshot, now: str) -> LoadSummary | None:
    load = snapshot.load
    if load is None:
        return None
    return summarize(load, now)


def _scaling_reason(observation: Observation) -> str:
    """Return what changed the number of replicas, as far as it is known."""
    plan, scaling = observation.plan, observation.scaling
    if plan is None or plan.autoscaling is None or plan.autoscaling.mode != "Active" or scaling is None:
        return "spec.replicas and spec.autoscaling"
    return scaling.why or "spec.autoscaling"


def _last_scaling(old: LLMDeploymentStatus, desired: int, now: str, reason: str) -> dict[str, Any] | None:
    # A status that was never written has no earlier number of replicas.
    if not old.conditions or old.desired_replicas == desired:
        unchanged: dict[str, Any] | None = _json(old.last_scaling)
        return unchanged
    return {"time": now, "fromReplicas": old.desired_replicas, "toReplicas": desired, "reason": reason}


def _last_start(old: LLMDeploymentStatus, observation: Observation) -> dict[str, Any] | None:
    start = observation.last_start
    if start is None:
        unchanged: dict[str, Any] | None = _json(old.last_start)
        return unchanged
    phases = {to_camel(f"{phase}_ms"): round(1000 * seconds) for phase, seconds in start.seconds.items()}
    shown: dict[str, Any] = _json(Start.model_validate({"time": start.time, "pod": start.name, **phases}))
    return shown


def _json(section: Any) -> Any:
    return None if section is None else section.model_dump(mode="json", by_alias=True, exclude_none=True)
