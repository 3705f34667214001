"""Events worth telling about a deployment, derived from two versions of its status. Pure; the same change tells once.

Only what somebody would act on: that it became ready, that a fault came, that its size changed. Faults that several
conditions share are one event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from pagemill_operator.status.conditions import PROGRESS

MAX_MESSAGE_CHARS = 1024
"""Kubernetes accepts no longer note."""


class WantedEvent(NamedTuple):
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def events_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[WantedEvent]:
    """What happened between two statuses (JSON); an empty `old` is a deployment that was just created."""
    return [*_scaled(old, new), *_faults(old, new), *_became_ready(old, new)]


def _scaled(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[WantedEvent]:
    before, after = old.get("desiredReplicas"), new.get("desiredReplicas")
    if None not in (before, after) and before != after:
        why = (new.get("lastScaling") or {}).get("reason", "")
        # Where a person has changed the spec, that is all there is to tell.
        message = f"from {before} to {after} replicas" + (f": {why}" if why and not why.startswith("spec.") else "")
        yield WantedEvent("Normal", "Scaled", message[:MAX_MESSAGE_CHARS])


def _faults(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[WantedEvent]:
    known = {condition["reason"] for condition in _false(old)}
    for condition in _false(new):
        reason = condition["reason"]
        if reason not in known and reason not in PROGRESS and reason != "NotPlanned":
            known.add(reason)
            yield WantedEvent("Warning", reason, condition["message"][:MAX_MESSAGE_CHARS])


def _became_ready(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[WantedEvent]:
    before, after = _ready(old), _ready(new)
    if after and after["status"] == "True" and (before is None or before["status"] != "True"):
        yield WantedEvent("Normal", "Ready", after["message"][:MAX_MESSAGE_CHARS])


def _ready(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((each for each in status.get("conditions", []) if each["type"] == "Ready"), None)


def _false(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (each for each in status.get("conditions", []) if each["status"] == "False")
