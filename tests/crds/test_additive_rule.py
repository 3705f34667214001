"""Each violation of the additive rule is reported with field and remedy; allowed changes are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from additive import breaks

from pagemill_crds.schema import structural_schema

Schema = dict[str, Any]
Change = Callable[[Schema], object]

SCHEMA: Schema = {
    "type": "object",
    "required": ["model"],
    "properties": {
        "model": {"type": "string", "minLength": 1, "maxLength": 10, "pattern": "^a"},
        "replicas": {"type": "integer", "minimum": 0, "maximum": 8, "default": 1},
        "share": {"type": "number", "minimum": 0, "exclusiveMinimum": False},
        "dtype": {"type": "string", "enum": ["auto", "float32"]},
        "names": {"type": "array", "maxItems": 4, "items": {"type": "string"}, "x-kubernetes-list-type": "set"},
        "labels": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}},
        "memory": {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]},
    },
    "x-kubernetes-validations": [{"rule": "self.replicas < 8", "message": "too many"}],
}


def fields(schema: Schema) -> Schema:
    properties: Schema = schema["properties"]
    return properties


BROKEN: dict[str, tuple[Change, str]] = {
    "removed": (lambda s: fields(s).pop("dtype"), "dtype: the field is gone; keep it"),
    "renamed": (
        lambda s: fields(s).update(numReplicas=fields(s).pop("replicas")),
        "replicas: the field is gone; renamed to numReplicas? Keep both",
    ),
    "required": (lambda s: s["required"].append("dtype"), "dtype: the field is required now; make it optional"),
    "new and required": (
        lambda s: (fields(s).update(fresh={"type": "string"}), s["required"].append("fresh")),
        "fresh: the field is required now",
    ),
    "type": (lambda s: fields(s)["replicas"].update(type="number"), "replicas: type changed from 'integer'"),
    "no int-or-string": (
        lambda s: fields(s)["memory"].pop("x-kubernetes-int-or-string"),
        "memory: x-kubernetes-int-or-string changed from True to none",
    ),
    "minimum": (lambda s: fields(s)["replicas"].update(minimum=1), "replicas: minimum changed from 0 to 1"),
    "maximum": (lambda s: fields(s)["replicas"].update(maximum=7), "replicas: maximum changed from 8 to 7"),
    "new bound": (lambda s: fields(s)["share"].update(maximum=1), "share: maximum changed from none to 1"),
    "exclusive": (
        lambda s: fields(s)["share"].update(exclusiveMinimum=True),
        "share: minimum 0 became exclusive; a bound may only be widened",
    ),
    "shorter": (lambda s: fields(s)["model"].update(maxLength=9), "model: maxLength changed from 10 to 9"),
    "pattern": (
        lambda s: fields(s)["model"].update(pattern="^b"),
        "model: pattern changed from '^a' to '^b'; it cannot",
    ),
    "new pattern": (lambda s: fields(s)["dtype"].update(pattern="^a"), "dtype: pattern changed from none"),
    "format": (lambda s: fields(s)["dtype"].update(format="uri"), "dtype: format changed from none"),
    "fewer items": (lambda s: fields(s)["names"].update(maxItems=3), "names: maxItems changed from 4 to 3"),
    "items": (lambda s: fields(s)["names"]["items"].update(maxLength=3), "names[]: maxLength changed from none to 3"),
    "list type": (
        lambda s: fields(s)["names"].update({"x-kubernetes-list-type": "atomic"}),
        "names: x-kubernetes-list-type changed from 'set'",
    ),
    "map values": (
        lambda s: fields(s)["labels"]["additionalProperties"].update(maxLength=62),
        "labels{}: maxLength changed from 63 to 62",
    ),
    "choice removed": (
        lambda s: fields(s)["dtype"].update(enum=["auto"]),
        "dtype: ['float32'] are no longer accepted; keep them",
    ),
    "choices": (lambda s: fields(s)["model"].update(enum=["a"]), "model: only ['a'] are accepted now"),
    "default": (
        lambda s: fields(s)["replicas"].update(default=2),
        "replicas: default changed from 1 to 2; objects that",
    ),
    "new default": (lambda s: fields(s)["dtype"].update(default="auto"), "dtype: default changed from none to 'auto'"),
    "no default": (lambda s: fields(s)["replicas"].pop("default"), "replicas: default changed from 1 to none"),
    "rule": (
        lambda s: s["x-kubernetes-validations"].append({"rule": "self.replicas > 0", "message": ""}),
        "the object: the rule `self.replicas > 0` may refuse what was accepted; begin it with `!has(self.NEW_FIELD)",
    ),
    "rule guarded by an old field": (
        lambda s: s["x-kubernetes-validations"].append({"rule": "!has(self.dtype) || self.replicas > 0"}),
        "the object: the rule `!has(self.dtype)",
    ),
}
ALLOWED: dict[str, Change] = {
    "a new field": lambda s: fields(s).update(fresh={"type": "string", "maxLength": 3, "default": "x"}),
    "a rule of a new field": lambda s: (
        fields(s).update(fresh={"type": "integer"}),
        s["x-kubernetes-validations"].append({"rule": "!has(self.fresh) || self.fresh < self.replicas"}),
    ),
    "a new choice": lambda s: fields(s)["dtype"]["enum"].append("bfloat16"),
    "any choice": lambda s: fields(s)["dtype"].pop("enum"),
    "wider bounds": lambda s: fields(s)["replicas"].update(minimum=-1, maximum=9),
    "no bounds": lambda s: [fields(s)["model"].pop(name) for name in ("minLength", "maxLength", "pattern")],
    "no longer required": lambda s: s["required"].clear(),
    "a rule less": lambda s: s.pop("x-kubernetes-validations"),
    "other words": lambda s: (
        s.update(description="New."),
        s["x-kubernetes-validations"][0].update(message="at most 7", fieldPath=".replicas"),
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_break_is_reported_with_its_field_and_remedy(change: Change, message: str) -> None:
    after = copy.deepcopy(SCHEMA)
    change(after)
    (found,) = breaks(SCHEMA, after)
    assert str(found).startswith(message)


@pytest.mark.parametrize("change", ALLOWED.values(), ids=ALLOWED)
def test_an_addition_is_not_a_break(change: Change) -> None:
    after = copy.deepcopy(SCHEMA)
    change(after)
    assert list(breaks(SCHEMA, after)) == []


def nodes(schema: Schema) -> list[Schema]:
    below = [*schema.get("properties", {}).values(), *(schema[k] for k in ("items",) if k in schema)]
    return [schema, *(node for each in below for node in nodes(each))]


def test_a_change_of_any_field_of_the_resource_is_noticed() -> None:
    whole = structural_schema()
    for number, node in enumerate(nodes(whole)):
        for name in node.get("properties", {}):
            after = copy.deepcopy(whole)
            del nodes(after)[number]["properties"][name]
            assert [each.keyword for each in breaks(whole, after)] == ["properties"], name
