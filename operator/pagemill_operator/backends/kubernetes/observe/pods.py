"""Turns one pod into a replica: its phase, and what keeps it from becoming ready."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Literal

from pagemill_operator.backends.kubernetes.observe.cause import Cause
from pagemill_operator.backends.kubernetes.observe.container import (
    ended_beside_cause,
    ended_cause,
    lost_node_cause,
    unready_cause,
    waiting_cause,
)
from pagemill_operator.backends.kubernetes.observe.scheduling import unschedulable
from pagemill_operator.backends.kubernetes.ownership import component_of
from pagemill_operator.backends.kubernetes.render.names import LOADER, SLEEP_ANNOTATION, WORKER
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.plan.types import Process
from pagemill_operator.status.observation import Phase, ReplicaObservation

OrderedState = Literal["asleep", "waking"]

CLOCK_STEP = timedelta(seconds=1)
"""The resolution of times in a status: whole seconds."""


def observe_pod(
    pod: Manifest,
    main: str,
    digest: str,
    process: Process | None,
    *,
    sleeps: bool = False,
    loads: bool = False,
) -> ReplicaObservation:
    """Return the replica of a pod.

    `main` is the name of the pod's main container, `process` the planned process if known, `sleeps` whether gateways
    report that the engine sleeps, and `loads` whether bytes arrive in this run of the loader: until then, a loader that
    runs again keeps the cause for which it ended.
    """
    pod = _without_past(pod) if loads else pod
    phase, cause = _phase(pod, main, process, sleeps)
    name = str(pod["metadata"]["name"])
    return ReplicaObservation(name, phase, digest, *(cause or ("", "")), ready_at=_ready_at(pod))


def runs_loader(pod: Manifest) -> bool:
    """Whether the loader runs in this pod, on its own or before an engine."""
    return loader_run(pod) is not None


def loader_run(pod: Manifest) -> int | None:
    """Return how often the loader that runs in this pod was started again, or None if none runs."""
    for each in _container_statuses(pod):
        if each["name"] == LOADER and "running" in each.get("state", {}):
            return int(each.get("restartCount", 0))
    return None


def ordered_state(pod: Manifest) -> OrderedState | None:
    """Return what the operator has ordered the engine to do, or None if it was ready since then.

    Gateways report at once whether an engine sleeps; the kubelet notices late. If gateways report nothing, for example
    to an operator that has just become leader, the order keeps a sleeping pod from being reported as failing.
    """
    ordered = (pod["metadata"].get("annotations") or {}).get(SLEEP_ANNOTATION)
    return ordered if ordered in ("asleep", "waking") else None


def _phase(pod: Manifest, main: str, process: Process | None, sleeps: bool) -> tuple[Phase, Cause | None]:
    status = pod.get("status", {})
    if pod["metadata"].get("deletionTimestamp"):
        return "draining", None
    if status.get("phase") in ("Failed", "Succeeded"):
        return "gone", None
    if not pod.get("spec", {}).get("nodeName"):
        return "pending", _why_pending(pod, process)
    if _condition(pod, "Ready").get("status") == "True":
        if main == LOADER and (cause := _last_failure(pod)):
            return "crashed", cause
        # The kubelet probes once a second and needs three equal results, so a sleeping pod may still be marked ready.
        return "asleep" if sleeps else "ready", None
    return _on_node(pod, main, sleeps)


def _last_failure(pod: Manifest) -> Cause | None:
    """Return why the loader's run before this one ended, or None if this is the first one."""
    status = next((each for each in _container_statuses(pod) if each["name"] == LOADER), {})
    return ended_cause(status) if status.get("lastState", {}).get("terminated") else None


def _without_past(pod: Manifest) -> Manifest:
    """Return the pod without how its loader ended before."""
    status = {
        name: [each if each["name"] != LOADER else {**each, "lastState": {}} for each in value]
        if name in ("initContainerStatuses", "containerStatuses")
        else value
        for name, value in pod.get("status", {}).items()
    }
    return {**pod, "status": status}


def _ready_at(pod: Manifest) -> float:
    since = _condition(pod, "Ready").get("lastTransitionTime")
    return datetime.fromisoformat(since).timestamp() if since else 0.0


def _why_pending(pod: Manifest, process: Process | None) -> Cause | None:
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") != "False":
        return None
    if scheduled.get("reason") == "SchedulingGated":
        return Cause(
            "SchedulingGated",
            "a scheduling gate keeps the pod pending: wait for its controller, or remove the gate from spec.template",
        )
    return unschedulable(str(scheduled.get("message", "")), process)


def _on_node(pod: Manifest, main: str, sleeps: bool) -> tuple[Phase, Cause | None]:
    """Return the phase of a pod that has a node and is not ready."""
    if _node_is_lost(pod):
        return "loading", lost_node_cause(pod["spec"]["nodeName"])
    for status in _container_statuses(pod):
        if cause := waiting_cause(status, _mounted_images(pod)):
            return "starting", _with_container_name(status, main, cause)
    for status in _container_statuses(pod):
        # An init container that has finished its work has ended well.
        if status.get("ready"):
            continue
        if status["name"] == main and (cause := ended_cause(status, is_probed=component_of(pod) != WORKER)):
            return "crashed", cause
        # A loader's pod does not start a container again that has ended well.
        if status["name"] != main and (cause := ended_beside_cause(status, may_complete=main == LOADER)):
            return "crashed", _with_container_name(status, main, cause)
    status = next((each for each in _container_statuses(pod) if each["name"] == main), {})
    if "running" not in status.get("state", {}):
        return "starting", None
    if not status.get("started"):
        return "starting", None
    if sleeps:
        return "asleep", None
    if not _was_ready(pod, status):
        return "loading", None
    rest = ordered_state(pod)
    return (rest, None) if rest is not None else ("loading", unready_cause())


def _mounted_images(pod: Manifest) -> list[str]:
    """Return the references of the pod's image volumes; the kubelet pulls them like container images."""
    volumes = pod.get("spec", {}).get("volumes", [])
    return [str(volume["image"].get("reference", "")) for volume in volumes if "image" in volume]


def _node_is_lost(pod: Manifest) -> bool:
    """Whether the cluster, not the kubelet, marked the pod unready; the kubelet would mark its containers too."""
    ready, containers = _condition(pod, "Ready"), _condition(pod, "ContainersReady")
    if (ready.get("status"), containers.get("status")) != ("False", "True"):
        return False
    return ready.get("reason") != "ReadinessGatesNotReady"


def _was_ready(pod: Manifest, status: dict[str, Any]) -> bool:
    """Whether the pod became unready after this run of the container began, and so was ready in between."""
    unready_since = _condition(pod, "Ready").get("lastTransitionTime")
    running_since = status["state"]["running"].get("startedAt")
    if not unready_since or not running_since:
        return False
    return datetime.fromisoformat(unready_since) > datetime.fromisoformat(running_since) + CLOCK_STEP


def left_s(manifest: Manifest, patience_s: float, now: datetime | None) -> float:
    """Return the seconds until the object is `patience_s` old; 0 if it is older or if a time is unknown."""
    created = manifest["metadata"].get("creationTimestamp")
    if created is None or now is None:
        return 0.0
    age_s = (now - datetime.fromisoformat(created)).total_seconds()
    # A clock that was set back must not hide a fault for ever.
    return patience_s - age_s if 0 <= age_s < patience_s else 0.0


def _with_container_name(status: dict[str, Any], main: str, cause: Cause) -> Cause:
    """Name the container in the cause if it is one that the user has added."""
    if status["name"] == main:
        return cause
    return Cause(cause.reason, f"container {status['name']}: {cause.message}")


def _container_statuses(pod: Manifest) -> Iterator[dict[str, Any]]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def _condition(pod: Manifest, kind: str) -> dict[str, Any]:
    conditions = pod.get("status", {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})
