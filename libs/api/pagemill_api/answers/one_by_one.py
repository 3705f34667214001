"""Arguments of formats that write each argument by itself instead of one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_READ = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "$schema",
        "title",
        "description",
    }
)


class CallArgument(NamedTuple):
    name: str
    schema: dict[str, Any] | bool
    """Includes the definitions of the whole schema, so that references can be resolved."""
    required: bool


def arguments_of(schema: Mapping[str, Any]) -> list[CallArgument]:
    """Return the declared arguments. Raises `ValueError` for a schema with keywords about the whole object."""
    if others := set(schema) - _READ:
        raise ValueError(f"this model's format writes arguments one by one, which cannot enforce {min(others)}")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    named = {**properties, **{name: True for name in required if name not in properties}}
    return [
        CallArgument(name, {**each, **definitions} if isinstance(each, dict) else each, name in required)
        for name, each in named.items()
    ]
