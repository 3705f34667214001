"""JSON schemas for answers: some written by hand, one for each feature or pitfall, and others generated from a seed."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_SHAPES = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0}},
            "required": ["kind", "radius"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"kind": {"const": "square"}, "side": {"type": "number", "minimum": 0}},
            "required": ["kind", "side"],
            "additionalProperties": False,
        },
    ]
}
_LIST = {
    "type": "object",
    "properties": {"head": {"type": "boolean"}, "tail": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["head", "tail"],
    "additionalProperties": False,
}


def _closed(properties: dict[str, Any], required: list[str] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


BY_HAND: list[Schema] = [
    _TREE,
    _SHAPES,
    _LIST,
    {"type": "string", "maxLength": 12},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "enum": ["rot", "grün", "蓝色", "😀", 'with "quotes"', "back\\slash", "new\nline"]},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "pattern": "^(foo|bar)+$", "maxLength": 12},
    {"type": "string", "pattern": "^[а-яё]{1,5}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "email", "maxLength": 20},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "hostname"},
    {"type": "integer"},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": 1000, "maximum": 1003},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "number"},
    {"type": "number", "minimum": 0.25, "maximum": 0.5},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"], "maxLength": 5},
    {"type": ["integer", "boolean", "null"]},
    {"const": {"a": [1, 2.5, None, True, {"é": "ü"}]}},
    {"enum": [1, "1", None, [1], {"one": 1}]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "maxItems": 0},
    _closed({"a": {"type": "string"}, "b": {"type": "integer"}}),
    _closed({"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}, ["b"]),
    _closed({}),
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer"}}, "additionalProperties": False},
    _closed({"naïve key": {"type": "null"}, 'say "hi"': {"type": "null"}, "tab\t": {"type": "null"}, "": {"const": 0}}),
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}, _closed({"a": {"type": "null"}})]},
    {"$defs": {"a/b": {"type": "integer"}, "c~d": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/c~0d"},
    _closed({"deep": _closed({"er": _closed({"est": _closed({"value": {"type": "string", "maxLength": 4}})})})}),
    {"title": "Titled", "description": "with notes", "examples": [1], "type": "integer", "default": 3},
]


def schemas(count: int) -> list[Schema]:
    """Return `count` schemas, always the same ones, starting with those written by hand."""
    generated = (_generated(random.Random(seed), depth=3) for seed in range(count))
    return [*BY_HAND, *generated][:count]


def _generated(rng: random.Random, depth: int) -> Schema:
    makers = [_string, _integer, _number, _enum, _pattern, _flag]
    if depth:
        makers += [_object, _object, _object, _array, _any_of, _reference]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _integer(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 5000)}


def _number(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(-40, 40) / 4
    return {"type": "number", "minimum": least, "maximum": least + rng.randint(1, 100)}


def _enum(rng: random.Random, depth: int) -> Schema:
    options: list[Any] = ["north", "süd", "東", "west side", 1, 2.5, None, True, ["x"], {"y": 0}]
    return {"enum": rng.sample(options, rng.randint(1, 5))}


def _pattern(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(["^[a-f0-9]{8}$", "^\\+?[1-9][0-9]{3,9}$", "^[^\\s]{1,6}$"])}


def _flag(rng: random.Random, depth: int) -> Schema:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "größe", "tags", "is ok", "価格", "parent", "x.y"], rng.randint(1, 4))
    properties = {name: _generated(rng, depth - 1) for name in names}
    return _closed(properties, [name for name in names if rng.random() < 0.7])


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    items = _generated(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_generated(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, depth: int) -> Schema:
    """Return a reference; only the top level may have definitions, so nested schemas refer to themselves."""
    inner = _generated(rng, 1)
    if depth < 3 or "$defs" in inner:
        return inner
    link = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    return {"$defs": {"inner": inner}, **_closed({"value": {"$ref": "#/$defs/inner"}, "next": link})}
