"""Turns the pods of a group into one replica: its first pod serves, one that is missing keeps all from it, and one
that is slow slows all.

When a container of a group is started again, all of its pods are made again, and what they had reported is gone with
them. So the cause is read from pods that are being deleted, too, and then from the status, until the group is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pagemill_operator.backends.kubernetes.observe.cause import Cause
from pagemill_operator.backends.kubernetes.observe.container import WAITING_REASONS, termination_cause, unready_cause
from pagemill_operator.backends.kubernetes.observe.pods import left_s
from pagemill_operator.backends.kubernetes.ownership import component_of
from pagemill_operator.backends.kubernetes.render.names import ENGINE, WORKER, group_name
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.plan.types import Plan
from pagemill_operator.status.conditions import OLDER_SERVE
from pagemill_operator.status.observation import Fault, ReplicaObservation
from pagemill_protocol.report.load import EngineReport

GROUPS_S = 30.0
"""Seconds for which a LeaderWorkerSet may have no pod before that is a fault."""
HALF_PLACED_S = 600.0
"""Seconds for which pods of a group may hold places while others find none, before that is said."""
SIZE = "leaderworkerset.sigs.k8s.io/size"
GROUP_INDEX, WORKER_INDEX = (f"leaderworkerset.sigs.k8s.io/{each}-index" for each in ("group", "worker"))
_CONSEQUENCES = ("RendezvousFailed", "RankLost")
"""Reasons that often follow from another pod's, the farthest one last."""
_NAMED = re.compile(r"pod (?P<pod>\S+) of the group (?P<group>\S+): ")
"""The beginning of the message of a group's cause."""
_HALF_PLACED = (
    f"; other pods of the group hold their places for more than {HALF_PLACED_S / 60:.0f} minutes: make room, or let a "
    "scheduler that places whole groups (Kueue, Volcano) admit it"
)


@dataclass(frozen=True)
class Reported:
    """What the status says of a group that does not run."""

    group: str
    cause: Cause
    lasts: bool
    """Whether a pod has ended for it, so that new pods do not show it; they show what they wait for themselves."""


def reported(owner: Manifest, plan: Plan | None) -> Reported:
    """Return what the status says of a group of this generation, or of one that differs in the number of replicas."""
    status = owner.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or []}
    ready, scheduled = conditions.get("Ready", {}), conditions.get("Scheduled", {})
    message = str(ready.get("message", "")).removesuffix(f"; {OLDER_SERVE}")
    named = _NAMED.match(message)
    digest = (status.get("plan") or {}).get("digest")
    is_of_plan = plan is not None and bool(plan.groups) and digest == plan.groups[0].digest
    if named is None or not (is_of_plan or ready.get("observedGeneration") == owner["metadata"].get("generation")):
        return Reported("", Cause("", ""), lasts=False)
    reason = str(ready["reason"])
    waits = (scheduled.get("status"), scheduled.get("reason")) == ("False", reason) or reason in WAITING_REASONS
    return Reported(named["group"], Cause(reason, message), lasts=not waits)


def workers_of(leader: Manifest, workers: Iterable[Manifest]) -> Iterator[Manifest]:
    """Yield the other pods of the group, also those that are being deleted, by number."""
    group = _label(leader, GROUP_INDEX)
    found = (pod for pod in workers if group and _label(pod, GROUP_INDEX) == group)
    return iter(sorted(found, key=lambda pod: int(_label(pod, WORKER_INDEX) or 0)))


def observe_group(
    leader: Manifest,
    seen: ReplicaObservation,
    workers: Sequence[tuple[Manifest, ReplicaObservation]],
    before: Reported,
    now: datetime | None,
) -> ReplicaObservation:
    """Return the replica of a group, of which `seen` is the first pod; alone in it: that pod's replica.

    A worker's cause comes first: that of the first pod is often that it has lost the worker.
    """
    size = int((leader["metadata"].get("annotations") or {}).get(SIZE, 1))
    if size == 1 or seen.phase == "gone" or seen.loaded:
        return seen
    members = [*workers, (leader, seen)]
    live = [each for _, each in members if each.live]
    placed = sum(each.phase != "pending" for each in live)
    faulty = [each for each in (_with_last_end(*member) for member in members) if each.fault]
    if faulty:
        first = min(faulty, key=lambda each: _distance(each.reason, each.message))
        message = f"pod {first.name} of the group {seen.name}: {first.message}"
        if first.phase == "pending" and placed:
            is_known = before.group == seen.name and before.cause.message == message + _HALF_PLACED
            message += _HALF_PLACED if is_known or not left_s(leader, HALF_PLACED_S, now) else ""
        found = replace(seen, phase=first.phase, reason=first.reason, message=message)
        return _with_reported(found, before)
    if not seen.live or seen.phase == "pending" or placed == size:
        return _with_reported(seen, before)
    return _with_reported(
        replace(seen, phase="starting", message=f"{placed} of {size} pods of the group are placed"), before
    )


def _with_last_end(pod: Manifest, seen: ReplicaObservation) -> ReplicaObservation:
    """Return a pod with the cause for which its engine has ended before: the group is made again because of that.

    One that is being deleted ends, too; so its present end is no cause.
    """
    if seen.fault:
        return seen
    statuses: list[dict[str, Any]] = pod.get("status", {}).get("containerStatuses") or []
    status = next((each for each in statuses if each["name"] == ENGINE), {})
    ended = status.get("lastState", {}).get("terminated")
    if not ended:
        return seen
    return replace(seen, phase="crashed", **termination_cause(ended, is_probed=component_of(pod) != WORKER)._asdict())


def _with_reported(seen: ReplicaObservation, before: Reported) -> ReplicaObservation:
    """Return a group that starts again with the cause for which it did, and not with what followed from that."""
    if not before.lasts or before.group != seen.name:
        return seen
    if seen.fault and (seen.phase == "pending" or _order(seen.reason, seen.message) <= _order(*before.cause)):
        return seen
    return replace(seen, phase="crashed", **before.cause._asdict())


def absent_group(before: Reported, replicas: Sequence[ReplicaObservation], plan: Plan) -> list[ReplicaObservation]:
    """Return the group that is made again and has no pod at this moment, or nothing."""
    wanted = (f"{group_name(plan.name)}-{number}" for number in range(plan.all_replicas))
    if not before.lasts or before.group not in wanted or any(each.name == before.group for each in replicas):
        return []
    return [ReplicaObservation(before.group, "crashed", plan.groups[0].digest, *before.cause)]


def _order(reason: str, message: str) -> tuple[int, bool]:
    """Return how far a group's cause is from the first one, and whether it is its first pod's: that pod sees the end of
    a worker before the worker's node reports it, and after the worker's pod is gone."""
    named = _NAMED.match(message)
    return _distance(reason, message), named is not None and named["pod"] == named["group"]


def _distance(reason: str, message: str) -> int:
    """Return how far a cause is from the first one. A pod that only is not ready any more is the farthest."""
    if message.endswith(unready_cause().message):
        return len(_CONSEQUENCES) + 1
    return _CONSEQUENCES.index(reason) + 1 if reason in _CONSEQUENCES else 0


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


def slow_ranks(pods: Sequence[Manifest], held: Mapping[str, EngineReport]) -> Iterator[Fault]:
    """Yield a warning for each replica of which one process keeps the others waiting: it serves, only slower.

    `held`: what engines report, by the uid of their pod. The figures are those of the moment in which it was found.
    """
    by_name = {str(pod["metadata"]["name"]): pod for pod in pods}
    for name, leader in sorted(by_name.items()):
        report = held.get(str(leader["metadata"].get("uid")))
        slow = report.slow_rank if report is not None else None
        if slow is None:
            continue
        place = f"{name}-{slow.node}" if slow.node else name
        node = by_name.get(place, {}).get("spec", {}).get("nodeName", "")
        message = (
            f"rank {slow.rank} (pod {place}{node and f' on node {node}'}) computes {slow.step_ms:g} ms in each step, "
            f"for which it would take {slow.expected_ms:g} ms at the speed of the other ranks, and all wait for it: "
            "check whether its CPU limit throttles it (raise spec.resources.cpu), and what else uses its node's cores; "
            "if the node itself is slow, kubectl cordon it and delete the pod"
        )
        yield Fault("ModelLoaded", "SlowRank", message)


def _label(pod: Manifest, name: str) -> str:
    return str((pod["metadata"].get("labels") or {}).get(name, ""))
