"""Decides whether and when a status is written. Pure functions.

A condition that changes its status or reason is written at once; changes of numbers and messages alone wait, so that a
start costs few writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

Status = Mapping[str, Any]

MIN_WRITE_INTERVAL_S = 5.0
"""Seconds between two writes that only update messages and counts."""
_RATE_LIMITED_FIELDS = frozenset({"readyReplicas", "standbyReplicas", "load", "lastStart", "adapters"})


def wait_s(old: Status, new: Status, since_write_s: float) -> float:
    """Return the seconds until `new`, which differs from `old`, should be written; 0 means now."""
    if _without_counts(old) != _without_counts(new):
        return 0.0
    return max(0.0, MIN_WRITE_INTERVAL_S - since_write_s)


def shortest_wait_s(*waits: float | None) -> float | None:
    """Return the shortest of some waits in seconds; None if all are None."""
    return min((wait for wait in waits if wait is not None), default=None)


def merge_patch(old: Status, new: Status) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7396) that turns `old` into `new`; None removes a field."""
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
    """Return the seconds that it took to become ready, if `new` is the first status that is; else None."""
    before, after = _ready(old), _ready(new)
    if after is None or after["status"] != "True" or (before is not None and before["status"] == "True"):
        return None
    since = before["lastTransitionTime"] if before is not None and before["status"] == "False" else created
    return max(0.0, (now - datetime.fromisoformat(since)).total_seconds())


def _without_counts(status: Status) -> Any:
    """Return everything of a status but messages, times and changing counts."""
    conditions = [
        (each["type"], each["status"], each["reason"], each.get("observedGeneration"))
        for each in status.get("conditions", [])
    ]
    rest = {name: value for name, value in status.items() if name not in _RATE_LIMITED_FIELDS and name != "conditions"}
    # Gateways read which adapters are served.
    adapters = [(each["name"], each.get("reason", "")) for each in status.get("adapters", [])]
    return conditions, adapters, rest


def _ready(status: Status) -> Mapping[str, Any] | None:
    return next((each for each in status.get("conditions", []) if each["type"] == "Ready"), None)
