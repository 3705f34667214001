"""Conditions of a deployment, computed from what a backend observed. Pure: the caller gives the time.

Neighbours: a backend fills `Observation`; the models of `pagemill_crds.status` are the result. Every condition is
always there (Unknown while nothing is known), and its transition time moves only when its status does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pagemill_crds.status import Condition
from pagemill_operator.plan.types import Plan, Problem

Phase = Literal["starting", "loading", "ready", "crashed", "draining", "gone"]
Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class ReplicaObservation:
    """One replica at one instant."""

    name: str
    phase: Phase
    digest: str = ""
    reason: str = ""
    """CamelCase cause of a crash or a wait."""
    message: str = ""

    @property
    def running(self) -> bool:
        return self.phase in ("starting", "loading", "ready")


@dataclass(frozen=True)
class Observation:
    """What is known about one deployment."""

    plan: Plan
    replicas: tuple[ReplicaObservation, ...] = ()
    gateway_ready: bool = False
    conflict: Problem | None = None
    unplanned: Problem | None = None
    """Why it is not known whether the plan can work, for example a source that only the pods can read."""
    slo_met: bool | None = None
    scaling: bool | None = None

    def ready(self, digest: str | None = None) -> list[ReplicaObservation]:
        return [r for r in self.replicas if r.phase == "ready" and digest in (None, r.digest)]


class Finding(NamedTuple):
    """One condition without its times."""

    type: str
    status: Truth
    reason: str
    message: str


def find_conditions(seen: Observation) -> list[Finding]:
    """All conditions, in the order of the resource's life."""
    findings = [_planned(seen), _scheduled(seen), _model_loaded(seen), _serving(seen)]
    findings += [_scaling_active(seen), _slo_met(seen)]
    return [*findings, _ready(seen, findings)]


def merge_conditions(old: list[Condition], findings: list[Finding], generation: int, now: str) -> list[Condition]:
    """The findings as conditions; `last_transition_time` is kept where the status is the same. `now`: RFC 3339."""
    before = {condition.type: condition for condition in old}
    return list(_merge(before, findings, generation, now))


def _merge(before: dict[str, Condition], findings: list[Finding], generation: int, now: str) -> Iterator[Condition]:
    for finding in findings:
        known = before.get(finding.type)
        same = known is not None and known.status == finding.status
        yield Condition.model_validate(
            {
                "type": finding.type,
                "status": finding.status,
                "observedGeneration": generation,
                "lastTransitionTime": known.last_transition_time if known and same else now,
                "reason": finding.reason,
                "message": finding.message[:32_768],
            }
        )


def _planned(seen: Observation) -> Finding:
    if seen.plan.problems:
        message = "; ".join(str(problem) for problem in seen.plan.problems)
        return Finding("Planned", "False", "UnsupportedField", message)
    if seen.conflict:
        return Finding("Planned", "False", "NameConflict", str(seen.conflict))
    if seen.unplanned:
        return Finding("Planned", "Unknown", "SourceNotReadable", str(seen.unplanned))
    return Finding("Planned", "True", "PlanMade", f"{seen.plan.replicas} replicas of {seen.plan.source}")


def _scheduled(seen: Observation) -> Finding:
    running = [replica for replica in seen.replicas if replica.running]
    if not _carried_out(seen):
        return Finding("Scheduled", "False", "NotPlanned", "nothing is started; see condition Planned")
    if len(running) >= seen.plan.replicas:
        return Finding("Scheduled", "True", "AllStarted", f"{len(running)} of {seen.plan.replicas} replicas run")
    crashed = [replica for replica in seen.replicas if replica.phase == "crashed"]
    reason = crashed[0].reason or "Crashed" if crashed else "Starting"
    message = f"{len(running)} of {seen.plan.replicas} replicas run"
    return Finding("Scheduled", "False", reason, f"{message}; {crashed[0].message}" if crashed else message)


def _model_loaded(seen: Observation) -> Finding:
    if seen.ready():
        return Finding("ModelLoaded", "True", "Loaded", "the model is loaded and has generated a token")
    crashed = [replica for replica in seen.replicas if replica.phase == "crashed"]
    if crashed:
        return Finding("ModelLoaded", "False", crashed[0].reason or "Crashed", crashed[0].message)
    loading = [replica for replica in seen.replicas if replica.running]
    if loading:
        return Finding("ModelLoaded", "False", "Loading", f"{loading[0].name}: {loading[0].message or 'starting'}")
    return Finding("ModelLoaded", "Unknown", "NoReplicas", "no replica runs")


def _serving(seen: Observation) -> Finding:
    if not seen.gateway_ready:
        return Finding("Serving", "False", "GatewayNotReady", "the gateway is not ready")
    if seen.ready():
        return Finding("Serving", "True", "Serving", f"{len(seen.ready())} replicas take requests")
    if seen.plan.replicas == 0:
        return Finding("Serving", "False", "ScaledToZero", "no replica is wanted")
    return Finding("Serving", "False", "NoReadyReplica", "no replica takes requests")


def _scaling_active(seen: Observation) -> Finding:
    if seen.scaling is None:
        return Finding("ScalingActive", "Unknown", "NotConfigured", "the number of replicas is fixed")
    status: Truth = "True" if seen.scaling else "False"
    return Finding("ScalingActive", status, "ScalingActive" if seen.scaling else "ScalingPaused", "")


def _slo_met(seen: Observation) -> Finding:
    if seen.slo_met is None:
        return Finding("SLOMet", "Unknown", "NotMeasured", "no SLO is measured")
    return Finding("SLOMet", "True" if seen.slo_met else "False", "WithinSLO" if seen.slo_met else "OutsideSLO", "")


def _ready(seen: Observation, findings: list[Finding]) -> Finding:
    """True when everything wanted runs and serves; otherwise the first cause on the way there."""
    for finding in findings:
        if finding.type in ("Planned", "Scheduled", "ModelLoaded", "Serving") and finding.status == "False":
            return Finding("Ready", "False", finding.reason, finding.message)
    ready = sum(len(seen.ready(group.digest)) for group in seen.plan.groups)
    if ready >= seen.plan.replicas:
        return Finding("Ready", "True", "AllReplicasReady", f"{ready} of {seen.plan.replicas} replicas are ready")
    waiting = [r for r in seen.replicas if r.phase in ("starting", "loading", "crashed")]
    message = f"{ready} of {seen.plan.replicas} replicas are ready"
    if waiting:
        message += f"; {waiting[0].name}: {waiting[0].message or waiting[0].phase}"
    return Finding("Ready", "False", "Progressing", message)


def _carried_out(seen: Observation) -> bool:
    return not seen.plan.problems and seen.conflict is None
