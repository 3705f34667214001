"""Write a JSON schema with the keywords that llguidance compiles: every value of the result is valid for the schema.

Where the schema cannot be written exactly, the result has fewer values (`uniqueItems` of values that are not listed: at
most one item). Keywords that are left over are refused by the compiler. `grammars.source` and `grammars.structure` call
it, in gateways' checks and in engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pagemill_api.grammars.schemas.counting import COMMENTS, counted, named, unique
from pagemill_api.grammars.schemas.negation import fewer, negation, one_of_these
from pagemill_api.grammars.schemas.reading import are_disjoint, resolved, shown

Schema = dict[str, Any]
MAX_SCHEMAS = 50_000
_SUPPORTED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_FORMATS: dict[str, Schema] = {
    "idn-email": {"format": "email"},
    "idn-hostname": {"format": "hostname"},
    "uri-reference": {"format": "uri"},
    "iri": {"format": "uri"},
    "iri-reference": {"format": "uri"},
    "uri-template": {"format": "uri"},
    "json-pointer": {"pattern": "^(/([^/~]|~[01])*)*$"},
    "relative-json-pointer": {"pattern": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$"},
    "regex": {"pattern": r"^(([A-Za-z0-9_ /:,;=@#%&'-]|\.|\\[dwsDWS./]|\[\^?[A-Za-z0-9_]+\])[*+?]?)*$"},
}
"""Formats of the specification that the compiler lacks, as narrower ones that it has."""
_PLAIN_PATTERN = re.compile(r"\^\[[A-Za-z0-9_.-]+\][*+]\$?")
"""Patterns whose search costs nothing."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "prefixItems")
_SINGLE = ("additionalProperties", "additionalItems")
_REWRITTEN = frozenset(
    {
        "oneOf",
        "not",
        "if",
        "uniqueItems",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "format",
    }
)


def writable(schema: Any) -> Any:
    """Return the schema itself, or one of which each value is valid for it. Raises `ValueError` with the reason."""
    if not _has_any(schema):
        return schema
    return _Rewriting(schema).root()


def _has_any(value: Any) -> bool:
    if isinstance(value, dict):
        return not _REWRITTEN.isdisjoint(value) or any(map(_has_any, value.values()))
    return isinstance(value, list) and any(map(_has_any, value))


class _Rewriting:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_schemas = 0
        self._references: set[str] = set()

    def root(self) -> Any:
        found = self.schema(self._root)
        moved: Schema = {}
        while lost := [each for each in sorted(self._references - moved.keys()) if self._is_lost(each, found)]:
            for each in lost:
                moved[each] = self.schema(resolved(self._root, each))
        if moved:
            found = _moved(found, {each: f"moved-{index}" for index, each in enumerate(moved)}, dict(moved))
        return found

    def _is_lost(self, reference: str, found: Any) -> bool:
        """Whether rewriting removed the target of a reference."""
        return resolved(found, reference) is None and resolved(self._root, reference) is not None

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise ValueError(f"its combinations need more than {MAX_SCHEMAS} schemas; send a simpler one")
        if isinstance(reference := schema.get("$ref"), str):
            self._references.add(reference)
        if schema.get("not") is True or schema.get("not") == {}:
            return False
        left = dict(schema)
        clauses: list[Any] = []
        for keyword in _KEYWORDS:
            if keyword in left:
                clauses += _KEYWORDS[keyword](self, left)
        _drop_repeated(left)
        for key in _MAPS:
            if isinstance(left.get(key), dict):
                left[key] = {name: self.schema(each) for name, each in left[key].items()}
        for key in _LISTS:
            if isinstance(left.get(key), list):
                left[key] = [self.schema(each) for each in left[key]]
        for key in _SINGLE:
            if key in left:
                left[key] = self.schema(left[key])
        items = left.get("items")
        if items is not None:
            left["items"] = [self.schema(each) for each in items] if isinstance(items, list) else self.schema(items)
        if clauses:
            written = [self.schema(each) for each in clauses if each is not True]
            left["allOf"] = [*left["allOf"], *written] if isinstance(left.get("allOf"), list) else written
        return left

    def _one_of(self, left: Schema) -> list[Any]:
        options = left.pop("oneOf")
        if not isinstance(options, list) or not options:
            raise ValueError("oneOf must be a list of schemas")
        around = [{"allOf": [left, each]} for each in options]
        alone = [self._alone(index, options, around) for index in range(len(options))]
        usable = [each for each in alone if each is not None]
        if not usable:
            raise ValueError("options of oneOf may overlap; send anyOf, or give each option a required constant")
        return [{"anyOf": usable}]

    def _alone(self, index: int, options: list[Any], around: list[Any]) -> Any:
        """Return an option without the values of the others, or None."""
        mine = around[index]
        near = [
            option
            for other, option in enumerate(options)
            if other != index and not are_disjoint(self._root, mine, around[other])
        ]
        broken = [self._broken(option, mine) for option in near]
        if not all(broken):
            return None
        outside = [one_of_these(each) for each in fewer(broken)]
        return {"allOf": [options[index], *outside]} if outside else options[index]

    def _broken(self, schema: Any, within: Any) -> list[Any]:
        """Return schemas of values that are not valid for `schema`, as far as they may be valid for `within`."""
        return [each for each in negation(self._root, schema) if not are_disjoint(self._root, within, each)]

    def _not(self, left: Schema) -> list[Any]:
        broken = self._broken(left["not"], {name: each for name, each in left.items() if name != "not"})
        if not broken:
            return []  # left to the compiler, which names it
        del left["not"]
        return [one_of_these(broken)]

    def _condition(self, left: Schema) -> list[Any]:
        condition = left.pop("if")
        then, otherwise = left.pop("then", True), left.pop("else", True)
        if then is True and otherwise is True:
            return []
        met = {"allOf": [condition, then]}
        return [one_of_these([met, *({"allOf": [each, otherwise]} for each in negation(self._root, condition))])]

    def _dependencies(self, key: str, left: Schema) -> list[Any]:
        found = left.pop(key)
        if not isinstance(found, dict):
            raise ValueError(f"{key} must be an object")
        return [
            {"anyOf": [{"properties": {name: False}}, {"required": each} if isinstance(each, list) else each]}
            for name, each in found.items()
        ]

    def _property_names(self, left: Schema) -> list[Any]:
        return named(self._root, left)

    def _counts(self, left: Schema) -> list[Any]:
        return counted(left)

    def _unique(self, left: Schema) -> list[Any]:
        return unique(self._root, left)

    def _format(self, left: Schema) -> list[Any]:
        name = left["format"]
        if name in _SUPPORTED_FORMATS:
            return []
        del left["format"]
        known = _FORMATS.get(name) if isinstance(name, str) else None
        if known is None or "string" not in shown(self._root, left).types:
            return []
        # Other types are not bound by a format of texts.
        return [known]


_Keyword = Callable[[_Rewriting, Schema], list[Any]]
_KEYWORDS: dict[str, _Keyword] = {
    "oneOf": _Rewriting._one_of,
    "not": _Rewriting._not,
    "if": _Rewriting._condition,
    "dependencies": lambda self, left: self._dependencies("dependencies", left),
    "dependentRequired": lambda self, left: self._dependencies("dependentRequired", left),
    "dependentSchemas": lambda self, left: self._dependencies("dependentSchemas", left),
    "propertyNames": _Rewriting._property_names,
    "minProperties": _Rewriting._counts,
    "maxProperties": _Rewriting._counts,
    "uniqueItems": _Rewriting._unique,
    "format": _Rewriting._format,
}


def _drop_repeated(left: Schema) -> None:
    """Leave a property to the pattern that has the same schema: the compiler does not join two references."""
    patterns, properties = left.get("patternProperties"), left.get("properties")
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return
    for pattern, each in patterns.items():
        if _PLAIN_PATTERN.fullmatch(pattern):
            bare = _without_comments(each)
            repeated = {name for name, own in properties.items() if _without_comments(own) == bare}
            left["properties"] = properties = {
                name: True if name in repeated and re.search(pattern, name) else own for name, own in properties.items()
            }


def _without_comments(schema: Any) -> Any:
    return {k: v for k, v in schema.items() if k not in COMMENTS} if isinstance(schema, dict) else schema


def _moved(found: Schema, names: dict[str, str], moved: Schema) -> Schema:
    """Return the schema with targets that rewriting removed as definitions."""

    def written(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: f"#/$defs/{names[each]}"
                if key == "$ref" and isinstance(each, str) and each in names
                else written(each)
                for key, each in value.items()
            }
        return [written(each) for each in value] if isinstance(value, list) else value

    held = {names[reference]: written(each) for reference, each in moved.items()}
    root: Schema = written(found)
    return {**root, "$defs": {**root.get("$defs", {}), **held}}
