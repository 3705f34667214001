"""Computes a deployment's conditions from a backend's observation, and the events that follow from their changes.

Pure: the caller passes the time. A backend fills `observation.Observation`; the result uses the models of
`pagemill_crds.status`. Every condition is always present (Unknown while nothing is known). Its transition time changes
only with its status, and its message only with new content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from pagemill_crds.status import Condition
from pagemill_operator.plan.unused import FIELDS as UNUSED_FIELDS
from pagemill_operator.plan.unused import unused_fields
from pagemill_operator.status.observation import Fault, Observation, Phase, ReplicaObservation

__all__ = ["Finding", "Observation", "Phase", "ReplicaObservation", "find_conditions", "merge_conditions"]

ConditionStatus = Literal["True", "False", "Unknown"]

PROGRESS = frozenset(
    {"Starting", "Loading", "Downloading", "NoReplicas", "NoReadyReplica", "ScaledToZero", "Progressing"}
)
"""Reasons of a False that only needs time, or that the user's own settings explain. All others are faults."""
MODEL_REFUSALS = frozenset({"UnsupportedArchitecture", "UnsupportedQuantization"})
"""Reasons of loaders and engines that have read the model's header and found that no replica can run the model."""
NOT_DECIDED = "NotDecided"
"""The reason while nothing is known yet, above all by a new leader: the earlier condition is kept."""
OLDER_SERVE = "replicas of an earlier spec still serve"
WARNING = "warning"
"""Precedes each warning in the message of Ready: what is wrong although all replicas serve."""
MAX_MESSAGE_CHARS = 4096
MAX_EVENT_CHARS = 1024
"""The longest note that Kubernetes accepts."""


class Finding(NamedTuple):
    """One condition without its times."""

    type: str
    status: ConditionStatus
    reason: str
    message: str

    @property
    def is_fault(self) -> bool:
        return self.status == "False" and self.reason not in PROGRESS


def find_conditions(seen: Observation) -> list[Finding]:
    """Return all conditions, in the order of the resource's life."""
    findings = [_planned(seen), _scheduled(seen), _model_loaded(seen), _serving(seen)]
    findings += [_scaling_active(seen), _slo_met(seen), _fields_supported(seen)]
    return [*findings, _ready(seen, findings)]


def merge_conditions(old: list[Condition], findings: list[Finding], generation: int, now: str) -> list[Condition]:
    """Return the findings as conditions; each keeps its `last_transition_time` if its status is the same. `now`: RFC
    3339.
    """
    before = {condition.type: condition for condition in old}
    return list(_merge(before, findings, generation, now))


def _merge(before: dict[str, Condition], findings: list[Finding], generation: int, now: str) -> Iterator[Condition]:
    for finding in findings:
        known = before.get(finding.type)
        if finding.reason == NOT_DECIDED and known is not None and known.reason != "NotConfigured":
            yield known.model_copy(update={"observed_generation": generation})
            continue
        same = known is not None and known.status == finding.status
        message = finding.message[:MAX_MESSAGE_CHARS]
        if known and same and _differs_only_in_digits(known, finding, generation):
            message = known.message
        yield Condition.model_validate(
            {
                "type": finding.type,
                "status": finding.status,
                "observedGeneration": generation,
                "lastTransitionTime": known.last_transition_time if known and same else now,
                "reason": finding.reason,
                "message": message,
            }
        )


def _differs_only_in_digits(known: Condition, finding: Finding, generation: int) -> bool:
    """Whether a fault differs only in digits: one that recurs has other free bytes and ports each time."""
    if not finding.is_fault or (known.reason, known.observed_generation) != (finding.reason, generation):
        return False
    return _without_digits(known.message) == _without_digits(finding.message[:MAX_MESSAGE_CHARS])


def _without_digits(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def _planned(seen: Observation) -> Finding:
    if seen.plan is None:
        return Finding("Planned", "False", "InvalidSpec", "; ".join(str(problem) for problem in seen.invalid))
    if seen.plan.problems:
        message = "; ".join(str(problem) for problem in seen.plan.problems)
        return Finding("Planned", "False", "UnsupportedField", message)
    if seen.conflict:
        return Finding("Planned", "False", "NameConflict", str(seen.conflict))
    if seen.fault and seen.fault.stage == "Planned":
        return Finding("Planned", "False", seen.fault.reason, seen.fault.message)
    if refusal := _refused_model(seen):
        return Finding("Planned", "False", refusal.reason, refusal.message)
    if seen.unplanned:
        return Finding("Planned", "Unknown", "SourceNotReadable", str(seen.unplanned))
    return Finding("Planned", "True", "PlanMade", f"{seen.plan.replicas} replicas of {seen.plan.source}")


def _refused_model(seen: Observation) -> Fault | None:
    """Return the fault that loader or engine found in the model's header: no replica of this plan can ever run."""
    fault = _first_fault(seen, "ModelLoaded")
    return fault if fault and fault.reason in MODEL_REFUSALS and not seen.ready_current() else None


def _fields_supported(seen: Observation) -> Finding:
    """Return False if fields have no effect. Replicas run without them, so this is no cause of `Ready`."""
    if seen.plan is None:
        return Finding("FieldsSupported", "Unknown", "NotPlanned", "the spec cannot be read: see condition Planned")
    if ignored := [*seen.plan.ignored, *unused_fields(seen.plan, seen.unused_settings or (), seen.routing_policies)]:
        message = "; ".join(each.as_ignored for each in ignored)
        return Finding("FieldsSupported", "False", "FieldNotSupported", message)
    if seen.unused_settings is None and unused_fields(seen.plan, UNUSED_FIELDS):
        message = "whether all fields have an effect is known once an engine has read the model"
        return Finding("FieldsSupported", "Unknown", NOT_DECIDED, message)
    return Finding("FieldsSupported", "True", "AllFieldsSupported", "all fields of the spec have an effect")


def _scheduled(seen: Observation) -> Finding:
    if seen.plan is None or not seen.is_in_effect:
        return Finding("Scheduled", "False", "NotPlanned", "no new replica is started: see condition Planned")
    if fault := _first_fault(seen, "Scheduled"):
        return Finding("Scheduled", "False", fault.reason, fault.message)
    running = [replica for replica in seen.current() if replica.running or replica.phase == "crashed"]
    message = f"{min(len(running), seen.plan.replicas)} of {seen.plan.replicas} replicas are placed"
    if len(running) >= seen.plan.replicas:
        return Finding("Scheduled", "True", "AllScheduled", message)
    if seen.loader is not None:
        return Finding("Scheduled", "False", "Downloading", "replicas start once the model is in its volume")
    return Finding("Scheduled", "False", "Starting", message)


def _model_loaded(seen: Observation) -> Finding:
    if seen.ready_current():
        return Finding("ModelLoaded", "True", "Loaded", "the model is loaded and has generated a token")
    if any(replica.loaded for replica in seen.current()):
        return Finding("ModelLoaded", "True", "Loaded", "the model is loaded; its replicas sleep")
    if not seen.is_in_effect and seen.ready():
        message = "no new replica is started" if seen.conflict else f"no new replica is started; {OLDER_SERVE}"
        return Finding("ModelLoaded", "Unknown", "NotPlanned", message)
    if fault := _first_fault(seen, "ModelLoaded"):
        return Finding("ModelLoaded", "False", fault.reason, fault.message)
    if seen.loader is not None or seen.progress:
        done = f": {seen.progress}" if seen.progress else ""
        return Finding("ModelLoaded", "False", "Downloading", f"the loader fills the model's volume{done}")
    loading = [replica for replica in seen.current() if replica.running]
    if loading:
        message = f"{loading[0].name}: {loading[0].message}" if loading[0].message else "the engine loads the model"
        return Finding("ModelLoaded", "False", "Loading", message)
    return Finding("ModelLoaded", "Unknown", "NoReplicas", "no replica of this spec runs")


def _serving(seen: Observation) -> Finding:
    if seen.conflict:
        return Finding("Serving", "False", "NameConflict", f"the gateway sends it no requests: {seen.conflict}")
    if not seen.gateway_ready:
        return Finding("Serving", "False", "GatewayNotReady", seen.gateway_message)
    if seen.ready():
        return Finding("Serving", "True", "Serving", "ready replicas take requests")
    if seen.plan is not None and seen.plan.replicas == 0:
        return Finding("Serving", "False", "ScaledToZero", _zero_message(seen))
    return Finding("Serving", "False", "NoReadyReplica", "no replica takes requests")


def _scaling_active(seen: Observation) -> Finding:
    scaling = seen.scaling
    if scaling is None and _is_scaled(seen):
        return Finding("ScalingActive", "Unknown", NOT_DECIDED, "the autoscaler has not decided yet")
    if scaling is None:
        return Finding("ScalingActive", "Unknown", "NotConfigured", "the number of replicas is fixed")
    if not scaling.active:
        return Finding("ScalingActive", "False", "SignalsMissing", scaling.message)
    return Finding("ScalingActive", "True", "AdvisoryOnly" if scaling.advisory else "ScalingActive", scaling.message)


def _slo_met(seen: Observation) -> Finding:
    scaling = seen.scaling
    if scaling is None and _is_scaled(seen):
        return Finding("SLOMet", "Unknown", NOT_DECIDED, "the autoscaler has not decided yet")
    if scaling is None or scaling.slo_met is None:
        return Finding("SLOMet", "Unknown", "NotMeasured", "no SLO is measured")
    if scaling.slo_met:
        return Finding("SLOMet", "True", "WithinSLO", "the requests of the last minute met the SLO")
    return Finding("SLOMet", "False", "OutsideSLO" if scaling.slo_reachable else "UnreachableSLO", scaling.slo_message)


def _is_scaled(seen: Observation) -> bool:
    return seen.is_in_effect and seen.plan is not None and seen.plan.autoscaling is not None


def _ready(seen: Observation, findings: list[Finding]) -> Finding:
    """Return True if everything wanted serves; otherwise the first cause that it does not, faults before waits."""
    steps = [f for f in findings if f.type in ("Planned", "Scheduled", "ModelLoaded", "Serving")]
    causes = [(f.reason, f.message) for f in steps if f.is_fault]
    causes += [(fault.reason, fault.message) for fault in _faults(seen)]
    if not causes and seen.plan is not None:
        warnings = [f"{WARNING} {each.reason}: {each.message}" for each in seen.warnings]
        if seen.plan.replicas == 0:
            return Finding("Ready", "False", "ScaledToZero", "; ".join([_zero_message(seen), *warnings]))
        num_ready = len(seen.ready_current())
        message = f"{min(num_ready, seen.plan.replicas)} of {seen.plan.replicas} replicas are ready"
        if num_ready >= seen.plan.replicas:
            return Finding("Ready", "True", "AllReplicasReady", "; ".join([message, *warnings]))
        causes += [(f.reason, f.message) for f in steps if f.status == "False" and not seen.ready()]
        causes.append(("Progressing", f"{message}; {seen.rollout}" if seen.rollout else message))
    reason, message = causes[0]
    older_serve = bool(seen.older()) and seen.conflict is None
    return Finding("Ready", "False", reason, f"{message}; {OLDER_SERVE}" if older_serve else message)


def _zero_message(seen: Observation) -> str:
    if seen.plan is not None and seen.plan.autoscaling is not None and seen.plan.autoscaling.mode == "Active":
        verb = "wakes" if seen.asleep() else "starts"
        return f"there are no requests; the next one {verb} a replica"
    return "spec.replicas is 0: raise it to serve requests"


def _faults(seen: Observation) -> Iterator[Fault]:
    """Yield the faults of the plan's own replicas and of what they wait for, not those of an earlier plan."""
    if not seen.is_in_effect:
        return
    if seen.fault:
        yield seen.fault
    replicas = [seen.loader, *seen.current()] if seen.loader else seen.current()
    yield from (replica.fault for replica in replicas if replica.fault)


def _first_fault(seen: Observation, stage: str) -> Fault | None:
    return next((fault for fault in _faults(seen) if fault.stage == stage), None)


class WantedEvent(NamedTuple):
    """An Event to write: the deployment became ready, got a fault, or changed its size."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def events_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[WantedEvent]:
    """Return the events for the changes between two statuses (JSON); an empty `old` is a new deployment.

    A fault that several conditions share is one event.
    """
    return [*_scaled_event(old, new), *_fault_events(old, new), *_ready_event(old, new), *_warning_events(old, new)]


def _scaled_event(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[WantedEvent]:
    before, after = old.get("desiredReplicas"), new.get("desiredReplicas")
    if None not in (before, after) and before != after:
        why = (new.get("lastScaling") or {}).get("reason", "")
        # If a user changed the spec, that is the whole reason.
        message = f"scaled from {before} to {after} replicas" + (
            f": {why}" if why and not why.startswith("spec.") else ""
        )
        yield WantedEvent("Normal", "Scaled", message[:MAX_EVENT_CHARS])


def _fault_events(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[WantedEvent]:
    known = {condition["reason"] for condition in _false(old)}
    for condition in _false(new):
        reason = condition["reason"]
        if reason not in known and reason not in PROGRESS and reason != "NotPlanned":
            known.add(reason)
            yield WantedEvent("Warning", reason, condition["message"][:MAX_EVENT_CHARS])


def _ready_event(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[WantedEvent]:
    before, after = _ready_of(old), _ready_of(new)
    if after and after["status"] == "True" and (before is None or before["status"] != "True"):
        yield WantedEvent("Normal", "Ready", after["message"][:MAX_EVENT_CHARS])


def _warning_events(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[WantedEvent]:
    known, found = _warnings(old), _warnings(new)
    for reason in found.keys() - known.keys():
        yield WantedEvent("Warning", reason, found[reason][:MAX_EVENT_CHARS])


def _warnings(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the warnings in the message of Ready, by reason."""
    ready = _ready_of(status)
    texts = ready["message"].split(f"; {WARNING} ")[1:] if ready else []
    return dict(text.split(": ", 1) for text in texts)


def _ready_of(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((each for each in status.get("conditions", []) if each["type"] == "Ready"), None)


def _false(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (each for each in status.get("conditions", []) if each["status"] == "False")
