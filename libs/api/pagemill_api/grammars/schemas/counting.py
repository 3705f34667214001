"""Keywords about how many properties and items there are, what properties are called, and that no item appears twice.

Each function takes keywords out of a schema and returns schemas that hold instead of them, together. Where there are
more combinations than `MAX_OPTIONS`, some are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice, pairwise
from typing import Any

from pagemill_api.grammars.schemas.reading import (
    MAX_LISTED,
    TYPES,
    are_disjoint,
    listed_values,
    parts,
    same,
    types_of,
)

Schema = dict[str, Any]
MAX_OPTIONS = 64


def counted(left: Schema) -> list[Any]:
    """Take out the bounds on the number of properties where some of these are optional."""
    properties, required = left.get("properties"), left.get("required")
    names = list(dict.fromkeys(required)) if isinstance(required, list) else []
    optional = [name for name in properties if name not in names] if isinstance(properties, dict) else []
    clauses: list[Any] = []
    if not optional:
        return clauses
    least, most = left.get("minProperties"), left.get("maxProperties")
    if isinstance(least, int) and least - len(names) <= len(optional):
        del left["minProperties"]
        if least > len(names):
            chosen = _chosen(optional, least - len(names))
            clauses.append({"anyOf": [{"required": list(each)} for each in chosen]})
    if isinstance(most, int) and most >= len(names):
        del left["maxProperties"]
        is_closed = left.get("additionalProperties") is False and not left.get("patternProperties")
        if not is_closed or len(optional) > most - len(names):
            chosen = _chosen(optional, min(most - len(names), len(optional)))
            clauses.append({"anyOf": [_only([*names, *each]) for each in chosen]})
    return clauses


def _only(names: Sequence[str]) -> Schema:
    return {"properties": dict.fromkeys(names, True), "additionalProperties": False}


def _chosen(names: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """Return combinations of names: all, or so many that each name is in one."""
    found = list(islice(combinations(names, count), MAX_OPTIONS + 1))
    if len(found) <= MAX_OPTIONS:
        return found
    doubled = [*names, *names]
    return [tuple(doubled[at : at + count]) for at in range(min(len(names), MAX_OPTIONS))]


def named(root: Any, left: Schema) -> list[Any]:
    """Take out `propertyNames`."""
    schema = left.pop("propertyNames")
    if schema is True:
        return []
    if schema is False:
        return [{"additionalProperties": False}]
    if (values := listed_values(root, schema)) is not None:
        return [_only([each for each in values if isinstance(each, str)])]
    clauses: list[Any] = []
    for part in parts(root, schema):
        clauses += _named_by(root, part)
    patterns = [key for each in clauses for key in each.get("patternProperties", ())]
    own = left.get("patternProperties")
    if isinstance(own, dict) and own and patterns:
        if not set(own) <= set(patterns) or len(patterns) > 1:
            raise ValueError("propertyNames cannot be combined with other patternProperties")
        left["additionalProperties"] = False
        return []
    return clauses


_NAME_KEYWORDS = frozenset({"type", "pattern", "minLength", "maxLength", "not", "$ref", "allOf", "format"})
COMMENTS = frozenset({"title", "description", "examples", "default", "$comment"})


def _named_by(root: Any, part: Schema) -> Iterator[Schema]:
    if others := part.keys() - _NAME_KEYWORDS - COMMENTS:
        raise ValueError(f"propertyNames cannot enforce {min(others)}; send a pattern, lengths or an enum")
    if isinstance(pattern := part.get("pattern"), str):
        yield {"patternProperties": {pattern: True}, "additionalProperties": False}
    least, most = part.get("minLength", 0), part.get("maxLength", "")
    if least or most != "":
        yield {"patternProperties": {f"^(?s:.){{{least},{most}}}$": True}, "additionalProperties": False}
    if "not" in part:
        values = listed_values(root, part["not"])
        if values is None:
            raise ValueError("propertyNames cannot enforce not; send a pattern, lengths or an enum")
        yield {"properties": {each: False for each in values if isinstance(each, str)}}


def unique(root: Any, left: Schema) -> list[Any]:
    """Take out `uniqueItems`. Items with listed values come in their order; of other items there is at most one."""
    if left.pop("uniqueItems") is not True or "array" not in types_of(left):
        return []
    if _are_different(root, left):
        return []
    least, most = left.get("minItems", 0), left.get("maxItems", MAX_LISTED)
    values = None if "prefixItems" in left else listed_values(root, left.get("items"))
    if values is None or len(values) > MAX_LISTED:
        if least > 1:
            raise ValueError("uniqueItems with several items needs items with listed values; give them an enum")
        arrays: list[Any] = [{"type": "array", "maxItems": 1}]
    else:
        values = [each for at, each in enumerate(values) if not any(same(each, other) for other in values[:at])]
        arrays = [{"type": "array", "maxItems": 0}] if least == 0 else []
        arrays += [
            {"type": "array", "prefixItems": [{"enum": part} for part in split], "items": False, "minItems": len(split)}
            for split in _splits(values, range(max(least, 1), min(most, len(values)) + 1))
        ]
        if not arrays:
            raise ValueError("uniqueItems demands more items than there are values")
    others = sorted(types_of(left) - {"array"}) if "type" in left else sorted(TYPES - {"array"})
    return [{"anyOf": [*arrays, *([{"type": others}] if others else [])]}]


def _are_different(root: Any, left: Schema) -> bool:
    """Whether the schemas of a tuple exclude equal items."""
    prefix = left.get("prefixItems", left["items"] if isinstance(left.get("items"), list) else None)
    rest = left.get("items") if "prefixItems" in left else left.get("additionalItems")
    if not isinstance(prefix, list) or rest is not False:
        return False
    return all(are_disjoint(root, one, other) for one, other in combinations(prefix[:MAX_LISTED], 2))


def _splits(values: list[Any], sizes: range) -> Iterator[list[list[Any]]]:
    """Yield ways to cut the values into consecutive parts, few of each number of parts."""
    each_size = max(1, MAX_OPTIONS // max(1, len(sizes)))
    for size in sizes:
        for cuts in islice(_cuts(len(values), size, each_size), each_size):
            ends = [0, *cuts, len(values)]
            yield [values[start:end] for start, end in pairwise(ends)]


def _cuts(length: int, size: int, most: int) -> Iterator[tuple[int, ...]]:
    every = list(islice(combinations(range(1, length), size - 1), most + 1))
    if len(every) <= most:
        yield from every
        return
    # Too many to yield all: parts of about the same length, and the same with the first cuts moved.
    even = [max(1, round(at * length / size)) for at in range(1, size)]
    yield tuple(sorted(set(even))) if len(set(even)) == size - 1 else tuple(range(1, size))
    for moved in range(1, length - size + 1):
        yield tuple(moved + at for at in range(size - 1))
