"""Schemas of values that are not valid for another schema.

A schema demands that all its keywords hold, so each keyword that can be broken gives one schema of values that break
it. Keywords that no schema can break in llguidance's terms (`multipleOf`, most patterns, ...) give none: fewer values
are found than there are, never a wrong one. What breaks a schema most plainly comes first: a missing property.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, TypeGuard

from pagemill_api.grammars.schemas.reading import MAX_DEPTH, MAX_LISTED, TYPES, resolved, types_of, values_of

Schema = dict[str, Any]
MAX_COMBINATIONS = 16
"""Of the ways in which several schemas are broken together."""
_ONE_SET = re.compile(r"\^\[(\^?)((?:[^\]\[\\&~]|\\.)+)\]([*+])\$")
"""A pattern of texts with characters of one set."""


def negation(root: Any, schema: Any, depth: int = 0) -> list[Any]:
    """Return schemas of which each value breaks `schema`; an empty list where none can be written."""
    if not isinstance(schema, dict):
        return [] if schema is True else [True]
    if depth > MAX_DEPTH:
        return []
    found: list[Any] = [*_of_objects(root, schema, depth), *_of_values(schema), *_of_bounds(schema)]
    found += _of_arrays(root, schema, depth)
    if isinstance(reference := schema.get("$ref"), str) and (target := resolved(root, reference)) is not None:
        found += negation(root, target, depth + 1)
    for each in _list(schema, "allOf"):
        found += negation(root, each, depth + 1)
    for key in ("anyOf", "oneOf"):
        each_broken = [negation(root, each, depth + 1) for each in _list(schema, key)]
        if each_broken and all(each_broken):
            found.append({"allOf": [one_of_these(options) for options in fewer(each_broken)]})
    if "not" in schema:
        found.append(schema["not"])
    return [*found, *_of_types(schema)]


def fewer(broken: list[list[Any]]) -> list[list[Any]]:
    """Return shorter lists of ways in which schemas are broken, so that there are few combinations of one of each."""
    kept = [list(each) for each in broken]
    while math.prod(map(len, kept)) > MAX_COMBINATIONS:
        longest = max(kept, key=len)
        del longest[-2 if len(longest) > 2 else -1]  # the last is often the widest: another type
    return kept


def one_of_these(options: list[Any]) -> Any:
    return options[0] if len(options) == 1 else {"anyOf": options}


def _of_types(schema: Schema) -> list[Schema]:
    if "type" not in schema:
        return []
    allowed = types_of(schema)
    # Of numbers, those that are no integers cannot be named.
    others = TYPES - allowed - ({"number"} if "integer" in allowed else set())
    return [{"type": sorted(others - {"integer"} if "number" in others else others)}] if others else []


def _of_values(schema: Schema) -> Iterator[Schema]:
    values = values_of(schema)
    if values is None or len(values) > MAX_LISTED:
        return
    texts = sorted({value for value in values if isinstance(value, str)})
    kinds = {_type_name(value) for value in values}
    others = TYPES - kinds - {"integer"}
    if texts:
        yield {"type": "string", "pattern": f"^(?s:{_any_text_but(texts)})$"}
    numbers = sorted({value for value in values if _is_number(value)})
    for above, below in pairwise([None, *numbers, None]) if numbers else ():
        low, high = {"exclusiveMinimum": above}, {"exclusiveMaximum": below}
        yield {"type": "number", **(low if above is not None else {}), **(high if below is not None else {})}
    if "boolean" in kinds and len(bools := {value for value in values if isinstance(value, bool)}) == 1:
        yield {"const": not bools.pop()}
    yield {"type": sorted(others)}


def _type_name(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")


def _any_text_but(texts: list[str]) -> str:
    """Return an expression for all texts but these, which are sorted."""
    ends = "" in texts
    branches = {
        first: [text[1:] for text in group] for first, group in groupby(filter(None, texts), lambda each: each[0])
    }
    options = [] if ends else [""]
    if branches:
        options.append(f"[^{''.join(map(_quoted, branches))}].*")
        options += [_quoted(first) + f"({_any_text_but(rests)})" for first, rests in branches.items()]
    else:
        options.append(".+")
    return "|".join(options)


def _quoted(char: str) -> str:
    return f"\\u{{{ord(char):x}}}" if not char.isascii() or not char.isprintable() else re.escape(char)


def _of_bounds(schema: Schema) -> Iterator[Schema]:
    """Yield the other side of each bound of a number, a length or a count, and texts without a pattern."""
    if isinstance(pattern := schema.get("pattern"), str) and (found := _ONE_SET.fullmatch(pattern)):
        outside = found[2] if found[1] else f"^{found[2]}"
        yield {"type": "string", "pattern": f"{'^$|' if found[3] == '+' else ''}[{outside}]"}
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if _is_number(low):
        yield {"type": "number", "maximum" if above is True else "exclusiveMaximum": low}
    if _is_number(high):
        yield {"type": "number", "minimum" if below is True else "exclusiveMinimum": high}
    if _is_number(above):
        yield {"type": "number", "maximum": above}
    if _is_number(below):
        yield {"type": "number", "minimum": below}
    for kind, least, most in (("string", "minLength", "maxLength"), ("array", "minItems", "maxItems")):
        if _is_number(size := schema.get(least)) and size > 0:
            yield {"type": kind, most: int(size) - 1}
        if _is_number(size := schema.get(most)):
            yield {"type": kind, least: int(size) + 1}
    if schema.get("minProperties") == 1:
        yield {"type": "object", "additionalProperties": False}


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_objects(root: Any, schema: Schema, depth: int) -> Iterator[Schema]:
    for name in _list(schema, "required"):
        if isinstance(name, str):
            yield {"type": "object", "properties": {name: False}}
    properties = schema.get("properties")
    for name, each in properties.items() if isinstance(properties, dict) else ():
        if broken := negation(root, each, depth + 1):
            yield {"type": "object", "properties": {name: one_of_these(broken)}, "required": [name]}


def _of_arrays(root: Any, schema: Schema, depth: int) -> Iterator[Schema]:
    items = schema.get("items")
    if isinstance(items, dict | bool) and "prefixItems" not in schema and (broken := negation(root, items, depth + 1)):
        yield {"type": "array", "prefixItems": [one_of_these(broken)], "minItems": 1}


def _list(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
