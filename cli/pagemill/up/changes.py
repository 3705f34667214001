"""Describes what an edit of the files changed, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pagemill.up.loading import Loaded
from pagemill.up.messages import show


def describe_changes(before: Sequence[Loaded], after: Sequence[Loaded]) -> list[str]:
    """Return one line for each deployment that was added or removed, and for each field that differs."""
    old = {item.deployment.key: item for item in before}
    new = {item.deployment.key: item for item in after}
    lines = [f"{item.plan.name}: removed" for key, item in old.items() if key not in new]
    lines += [f"{item.plan.name}: added" for key, item in new.items() if key not in old]
    for key in old.keys() & new.keys():
        lines += _changed_fields(old[key], new[key])
    return lines


def _changed_fields(old: Loaded, new: Loaded) -> Iterator[str]:
    before, after = _flat(old.deployment.spec.model_dump()), _flat(new.deployment.spec.model_dump())
    rolling = old.plan.groups[0].digest != new.plan.groups[0].digest
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path), after.get(path)
        if was != now:
            effect = " (replaces replicas)" if rolling else ""
            yield f"{new.plan.name}: spec{path}: {_show(was)} -> {_show(now)}{effect}"


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {key: leaf for name, child in value.items() for key, leaf in _flat(child, f"{path}.{name}").items()}
    if isinstance(value, list) and value:
        return {key: leaf for i, child in enumerate(value) for key, leaf in _flat(child, f"{path}[{i}]").items()}
    return {path: None if value in ([], {}) else value}


def _show(value: Any) -> str:
    return "unset" if value is None else show(value)
