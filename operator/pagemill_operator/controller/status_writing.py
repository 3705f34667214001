"""Whether and when a status is written. Pure.

A condition that turns is written at once; numbers and words that only move on wait, so that the way to Ready costs few
writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

Status = Mapping[str, Any]

CALM_INTERVAL_S = 5.0
"""Between two writes that only bring messages and counts up to date."""
_CALM_FIELDS = frozenset({"readyReplicas", "standbyReplicas", "load", "lastStart"})


def wait_s(old: Status, new: Status, since_write_s: float) -> float:
    """Seconds until `new` should be written over `old`; 0: now. They differ."""
    if _turning(old) != _turning(new):
        return 0.0
    return max(0.0, CALM_INTERVAL_S - since_write_s)


def soonest_s(*waits: float | None) -> float | None:
    """The shortest of some waits; None where nothing is waited for."""
    return min((wait for wait in waits if wait is not None), default=None)


def merge_patch(old: Status, new: Status) -> dict[str, Any]:
    """What to merge into `old` so that `new` stands there; `None` removes (RFC 7396)."""
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if value == before and name in old:
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            patch[name] = merge_patch(before, value)
        else:
            patch[name] = value
    return patch


def ready_after_s(old: Status, new: Status, created: str, now: datetime) -> float | None:
    """Seconds it took to become ready, if `new` says so for the first time since it was not."""
    before, after = _ready(old), _ready(new)
    if after is None or after["status"] != "True" or (before is not None and before["status"] == "True"):
        return None
    since = before["lastTransitionTime"] if before is not None and before["status"] == "False" else created
    return max(0.0, (now - datetime.fromisoformat(since)).total_seconds())


def _turning(status: Status) -> Any:
    """What is news: everything but messages, times and counts that move."""
    conditions = [
        (each["type"], each["status"], each["reason"], each.get("observedGeneration"))
        for each in status.get("conditions", [])
    ]
    rest = {name: value for name, value in status.items() if name not in _CALM_FIELDS and name != "conditions"}
    return conditions, rest


def _ready(status: Status) -> Mapping[str, Any] | None:
    return next((each for each in status.get("conditions", []) if each["type"] == "Ready"), None)
