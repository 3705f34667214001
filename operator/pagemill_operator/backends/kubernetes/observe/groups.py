"""Turns the pods of a group into one replica: its first pod serves, and one that is missing keeps all from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime

from pagemill_operator.backends.kubernetes.observe.pods import left_s
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.status.observation import Fault, ReplicaObservation

GROUPS_S = 30.0
"""Seconds for which a LeaderWorkerSet may have no pod before that is a fault."""
HALF_PLACED_S = 600.0
"""Seconds for which pods of a group may hold places while others find none, before that is said."""
SIZE = "leaderworkerset.sigs.k8s.io/size"
GROUP_INDEX, WORKER_INDEX = (f"leaderworkerset.sigs.k8s.io/{each}-index" for each in ("group", "worker"))


def workers_of(leader: Manifest, workers: Iterable[Manifest]) -> Iterator[tuple[int, Manifest]]:
    """Yield the other pods of the group by number."""
    group = _label(leader, GROUP_INDEX)
    for pod in workers:
        if group and _label(pod, GROUP_INDEX) == group and not pod["metadata"].get("deletionTimestamp"):
            yield int(_label(pod, WORKER_INDEX) or 0), pod


def observe_group(
    leader: Manifest, seen: ReplicaObservation, workers: Mapping[int, ReplicaObservation], now: datetime | None
) -> ReplicaObservation:
    """Return the replica of a group, of which `seen` is the first pod; alone in it: that pod's replica.

    A worker's cause comes first: that of the first pod is often that it has lost the worker.
    """
    size = int((leader["metadata"].get("annotations") or {}).get(SIZE, 1))
    if size == 1 or not seen.live or seen.loaded:
        return seen
    pods = [*(workers[number] for number in sorted(workers)), seen]
    placed = sum(each.phase != "pending" for each in pods)
    faulty = next((each for each in pods if each.fault), None)
    if faulty is not None:
        message = f"pod {faulty.name} of the group {seen.name}: {faulty.message}"
        if faulty.phase == "pending" and placed and not left_s(leader, HALF_PLACED_S, now):
            message += (
                f"; other pods of the group hold their places for more than {HALF_PLACED_S / 60:.0f} minutes: make "
                "room, or let a scheduler that places whole groups (Kueue, Volcano) admit it"
            )
        return replace(seen, phase=faulty.phase, reason=faulty.reason, message=message)
    if seen.phase == "pending" or placed == size:
        return seen
    return replace(seen, phase="starting", message=f"{placed} of {size} pods of the group are placed")


def groups_not_made(groups: Manifest, left: float) -> Fault | None:
    """Return the fault of a LeaderWorkerSet without pods; `left`: seconds that it may still take."""
    if left or not groups["spec"].get("replicas", 1):
        return None
    name = groups["metadata"]["name"]
    message = (
        f"the LeaderWorkerSet {name} has no pods: check that its controller runs (kubectl get pods -n lws-system), and "
        f"see kubectl describe statefulset {name} for a ResourceQuota, a LimitRange or a policy that refuses them"
    )
    return Fault("Scheduled", "PodsNotCreated", message)


def _label(pod: Manifest, name: str) -> str:
    return str((pod["metadata"].get("labels") or {}).get(name, ""))
