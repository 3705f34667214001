"""How a pod's start went, by phase: what its conditions tell, and what its engine told of itself. Pure.

Kubernetes' times have whole seconds, the engine's own are exact: the phases of the pod are as coarse as that.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.status.observation import LastStart

ENGINE_PHASES = ("load", "warm", "first_token")
PHASES = ("schedule", "pull", "boot", *ENGINE_PHASES, "total")
"""In their order, from the pod's creation: until it has a node; until its container runs; until the engine looks at the
model, and what lies between the engine's readiness and the kubelet's next look; the engine's own three."""


def start_of(pod: Manifest, main: str, engine: Mapping[str, float]) -> LastStart | None:
    """None while it has not come that far, and of a container that was started again: that is no cold start."""
    created, scheduled = _time(pod["metadata"].get("creationTimestamp")), _since(pod, "PodScheduled")
    containers: list[dict[str, Any]] = pod.get("status", {}).get("containerStatuses") or []
    status = next((each for each in containers if each["name"] == main), {})
    running = _time(status.get("state", {}).get("running", {}).get("startedAt"))
    ready = _since(pod, "Ready")
    if created is None or scheduled is None or running is None or ready is None or status.get("restartCount"):
        return None
    told = {phase: max(0.0, engine.get(phase, 0.0)) for phase in ENGINE_PHASES}
    boot_s = (ready - running).total_seconds() - sum(told.values())
    seconds = {
        "schedule": (scheduled - created).total_seconds(),
        "pull": (running - scheduled).total_seconds(),
        "boot": boot_s,
        **told,
        "total": (ready - created).total_seconds(),
    }
    # A clock that was set back must not make a phase take less than no time.
    return LastStart(
        pod["metadata"]["name"],
        ready.strftime("%Y-%m-%dT%H:%M:%SZ"),
        {phase: round(max(0.0, seconds[phase]), 3) for phase in PHASES},
    )


def _since(pod: Manifest, kind: str) -> datetime | None:
    """When that condition became true, if it is."""
    conditions: list[dict[str, Any]] = pod.get("status", {}).get("conditions") or []
    found = next((each for each in conditions if each["type"] == kind and each["status"] == "True"), {})
    return _time(found.get("lastTransitionTime"))


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
