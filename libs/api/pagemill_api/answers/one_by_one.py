"""Arguments of formats that write each argument by itself instead of one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pagemill_api.structural_tags import ConstString, Format, Optional, Or, SequenceFormat

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


def required_first(arguments: Sequence[tuple[Format, bool]], separator: str) -> Format:
    """Return the form of arguments with a separator between them: the required ones, then any of the others.

    `arguments`: each with whether it is required.
    """

    def further(argument: Format) -> Format:
        return SequenceFormat(elements=[ConstString(value=separator), argument])

    required = [each for each, is_required in arguments if is_required]
    others = [each for each, is_required in arguments if not is_required]
    if required:
        first, *rest = required
        return SequenceFormat(
            elements=[first, *map(further, rest), *(Optional(content=further(each)) for each in others)]
        )
    starts: list[Format] = [
        SequenceFormat(elements=[each, *(Optional(content=further(other)) for other in others[at:])])
        for at, each in enumerate(others, start=1)
    ]
    return Optional(content=Or(elements=starts)) if starts else ConstString(value="")
