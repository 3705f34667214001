"""Whether and when a status is written, and that the patch gives exactly the required status."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pagemill_operator.controller.reporting.status_writing import (
    MIN_WRITE_INTERVAL_S,
    merge_patch,
    ready_after_s,
    shortest_wait_s,
    wait_s,
)

values = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
statuses = st.dictionaries(st.text(max_size=3), values, max_size=5)


def merged(target: Any, patch: Any) -> Any:
    """Apply the patch by RFC 7396, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def status(ready: str = "False", reason: str = "Loading", message: str = "m", **more: Any) -> dict[str, Any]:
    condition = {
        "type": "Ready",
        "status": ready,
        "reason": reason,
        "message": message,
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:10Z",
    }
    return {"conditions": [condition], "replicas": 1, "readyReplicas": 0, **more}


@given(statuses, statuses)
def test_the_patch_turns_one_status_into_the_other(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert merged(old, merge_patch(old, new)) == new


@given(statuses)
def test_without_changes_the_patch_is_empty(old: dict[str, Any]) -> None:
    assert merge_patch(old, old) == {}


def test_a_changed_condition_is_written_at_once() -> None:
    assert wait_s(status(), status("True", "AllReplicasReady"), since_write_s=0.0) == 0.0
    assert wait_s(status(), status(reason="CrashLoop"), since_write_s=0.0) == 0.0
    assert wait_s({}, status(), since_write_s=0.0) == 0.0
    assert wait_s(status(), status(replicas=2), since_write_s=0.0) == 0.0


def test_changed_messages_and_counts_wait_a_little() -> None:
    assert wait_s(status(), status(message="loading 20 %"), since_write_s=1.0) == MIN_WRITE_INTERVAL_S - 1.0
    assert wait_s(status(), status(readyReplicas=1), since_write_s=0.0) == MIN_WRITE_INTERVAL_S
    assert wait_s(status(), status(readyReplicas=1), since_write_s=60.0) == 0.0


def test_the_time_to_ready_counts_from_the_creation_or_from_the_last_time_unready() -> None:
    now = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    created = "2026-01-01T00:00:00Z"
    assert ready_after_s({}, status("True"), created, now) == 30.0
    assert ready_after_s(status(), status("True"), created, now) == 20.0
    assert ready_after_s(status("True"), status("True"), created, now) is None
    assert ready_after_s({}, status(), created, now) is None


def test_the_shortest_wait_applies() -> None:
    assert shortest_wait_s(None, 3.0, 0.0) == 0.0
    assert shortest_wait_s(None, 3.0) == 3.0
    assert shortest_wait_s(None, None) is None
