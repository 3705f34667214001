"""Read what a JSON schema says: references, types, listed values, and whether two schemas share no value.

Answers are safe, not complete: "disjoint" and "listed" are said only where the schema shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
MAX_DEPTH = 12
"""References and conjunctions that are followed."""
MAX_LISTED = 64
_BEGINNING = re.compile(r"^\^([A-Za-z0-9 _/:-]+)(?![*?+{A-Za-z0-9 _/:-])")


def resolved(root: Any, reference: str) -> Any:
    """Return the schema of a reference within the document, or None."""
    if not reference.startswith("#"):
        return None
    found = root
    for step in filter(None, reference[1:].split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


class Shown(NamedTuple):
    """What a schema demands together with its references and its `allOf`."""

    types: frozenset[str]
    required: frozenset[str]
    properties: dict[str, list[Any]]
    closed: list[dict[str, Any]]
    """Its parts that forbid all properties but their own."""
    listed: list[list[Any]]
    """Values of each `enum` and `const`."""
    beginnings: list[str]
    """Texts with which a text must begin."""


def shown(root: Any, schema: Any) -> Shown:
    types, required = TYPES, frozenset[str]()
    properties: dict[str, list[Any]] = {}
    closed, listed, beginnings = [], [], []
    for part in parts(root, schema):
        types = types & types_of(part)
        names = part.get("required")
        required |= frozenset(each for each in names if isinstance(each, str)) if isinstance(names, list) else set()
        own = part.get("properties")
        for name, each in own.items() if isinstance(own, dict) else ():
            properties.setdefault(name, []).append(each)
        if part.get("additionalProperties") is False and not part.get("patternProperties"):
            closed.append(part)
        if isinstance(pattern := part.get("pattern"), str) and "|" not in pattern:
            beginnings += _BEGINNING.findall(pattern)
        if (values := values_of(part)) is not None:
            listed.append(values)
            types = types & frozenset(name for value in values for name in _types_of_value(value))
    return Shown(types, required, properties, closed, listed, beginnings)


def parts(root: Any, schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a schema and those that it demands besides: its reference and its `allOf`."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    yield schema
    if isinstance(reference := schema.get("$ref"), str):
        yield from parts(root, resolved(root, reference), depth + 1)
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        yield from parts(root, each, depth + 1)


def types_of(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that `type` allows; `number` includes `integer`."""
    named = schema.get("type", list(TYPES))
    names = frozenset(each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str))
    return names | {"integer"} if "number" in names else names


def values_of(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def listed_values(root: Any, schema: Any) -> list[Any] | None:
    """Return all values of a schema that lists them, or None. Other keywords may forbid some of them."""
    found = shown(root, schema)
    if found.listed:
        return [value for value in found.listed[0] if found.types.intersection(_types_of_value(value))]
    if isinstance(schema, dict) and found.types and found.types <= {"null", "boolean"}:
        return [*([None] if "null" in found.types else []), *([True, False] if "boolean" in found.types else [])]
    for key in ("anyOf", "oneOf"):
        options = schema.get(key) if isinstance(schema, dict) else None
        if isinstance(options, list) and options:
            each = [listed_values(root, option) for option in options[:MAX_LISTED]]
            if all(values is not None for values in each):
                return [value for values in each for value in values or ()]
    return None


def text_properties(schema: Any) -> list[str]:
    """Return the properties of which each value but `null` is a text."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return []
    return [name for name, each in properties.items() if is_text(schema, each)]


def is_text(root: Any, schema: Any, depth: int = 0) -> bool:
    """Whether each value of a schema but `null` is a text, and a text may be one."""
    types = shown(root, schema).types
    if "string" in types and types <= {"string", "null"}:
        return True
    if depth > MAX_DEPTH:
        return False
    return any(
        _are_texts(root, [each for each in part[key] if shown(root, each).types != {"null"}], depth + 1)
        for part in parts(root, schema)
        for key in ("anyOf", "oneOf")
        if isinstance(part.get(key), list)
    )


def listed_texts(root: Any, schema: Any) -> list[str] | None:
    """Return the texts that a schema lists, with its references and its `allOf`, or None."""
    listed = shown(root, schema).listed
    if not listed:
        return None
    first, *others = listed
    return [value for value in first if isinstance(value, str) and all(value in each for each in others)]


def _are_texts(root: Any, options: list[Any], depth: int) -> bool:
    return bool(options) and all(is_text(root, each, depth) for each in options)


def are_disjoint(root: Any, first: Any, second: Any, depth: int = 0) -> bool:
    """Whether the schemas show that no value is valid for both."""
    if first is False or second is False:
        return True
    one, other = shown(root, first), shown(root, second)
    common = one.types & other.types
    if not common:
        return True
    for mine in one.listed:
        for theirs in other.listed:
            if len(mine) * len(theirs) <= MAX_LISTED**2 and not any(same(a, b) for a in mine for b in theirs):
                return True
    if common == {"string"}:
        return any(
            not (mine.startswith(theirs) or theirs.startswith(mine))
            for mine in one.beginnings
            for theirs in other.beginnings
        )
    if common != {"object"} or depth > MAX_DEPTH:
        return False
    if _forbids(one, other.required) or _forbids(other, one.required):
        return True
    return any(
        are_disjoint(root, mine, theirs, depth + 1)
        for name in one.required & other.required
        for mine in one.properties.get(name, ())
        for theirs in other.properties.get(name, ())
    )


def _forbids(found: Shown, names: frozenset[str]) -> bool:
    if any(each is False for name in names for each in found.properties.get(name, ())):
        return True
    return any(name not in (part.get("properties") or {}) for part in found.closed for name in names)


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal in JSON: `true` is not 1, and 1.0 is 1."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    return bool(first == second)


def _types_of_value(value: Any) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"integer", "number"} if value.is_integer() else {"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})
