"""Messages may only get new fields, so that peers of this release and the last one understand each other."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from wire_messages import MESSAGES, RELEASED, breaks, schemas

Schemas = dict[str, Any]

BEFORE: Schemas = json.loads(RELEASED.read_text("utf-8"))

REFUSED = "peers of the last release would refuse it or read it otherwise; add a field with a default beside it"
CATALOGUE = (
    "no release has served adapters; a gateway of a cluster builds its catalogue itself, one of `up` is started with it"
)
BLOCKS = "peers take the cache for unreported, as before a first report; engines queue what they cannot hold"
_REASONS = (
    "'OutOfBounds', 'Panic', 'RateLimited', 'ReplicasStarting'",
    "'ScaledDown', 'ScaledToZero', 'ScaledUp', 'SignalsMissing', 'Stabilizing', 'Steady', 'Woken'",
)
REVIEWED: dict[str, str] = {
    "PoolingSpec.method: changed from {'enum': ['cls', 'last', 'mean']} to "
    "{'enum': ['cls', 'last', 'max', 'mean', 'mean_sqrt_len', 'weighted_mean']}; " + REFUSED: (
        "engines of the last release serve no model with the new ones"
    ),
    f"Decision.reason: changed from {{'enum': [{', '.join(_REASONS)}]}} to "
    f"{{'enum': ['AtMaximum', {_REASONS[0]}, 'Saturated', {_REASONS[1]}]}}; " + REFUSED: (
        "operators leave out kept records that they cannot read; `pagemill why` names the command to use"
    ),
    "CacheKind.block_bytes: changed from {'default': 0, 'type': 'integer'} to {'default': 1, 'type': 'integer'}; "
    + REFUSED: "engines send it for every kind that has memory",
    **{
        f"{load}.num_blocks_{state}: the field is gone; keep it, with its default": BLOCKS
        for load in ("EngineLoad", "EnginesLoad")
        for state in ("active", "evictable", "free", "total")
    },
    "CatalogAdapter: the message is gone or has another name here; "
    "list the change as reviewed if it is a rename": CATALOGUE,
    "CatalogModel.adapters: changed from {'default': [], 'items': {'$ref': 'CatalogAdapter'}, 'type': 'array'} to "
    "{'default': [], 'items': {'type': 'string'}, 'type': 'array'}; " + REFUSED: CATALOGUE,
    "CatalogModel.weight: changed from {'default': 100, 'type': 'integer'} to "
    "{'anyOf': [{'type': 'integer'}, {'type': 'null'}], 'default': None}; " + REFUSED: CATALOGUE,
}
"""For each break, as `breaks` names it, the reason why peers of the last release accept it."""


def test_messages_only_grew_since_the_last_release() -> None:
    found = list(breaks(BEFORE, schemas()))
    assert [each for each in found if each not in REVIEWED] == []
    assert REVIEWED.keys() <= set(found), "these reviewed breaks do not exist (any more)"


def structs(kind: msgspec.inspect.Type, seen: set[type] | None = None) -> Iterator[msgspec.inspect.StructType]:
    seen = set() if seen is None else seen
    if isinstance(kind, msgspec.inspect.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
        yield kind
        for field in kind.fields:
            yield from structs(field.type, seen)
    for name in ("types", "item_type", "item_types", "key_type", "value_type"):
        inner = getattr(kind, name, ())
        for each in inner if isinstance(inner, tuple) else (inner,):
            yield from structs(each, seen)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_fields_that_a_later_release_adds_are_ignored(message: type[msgspec.Struct]) -> None:
    found = list(structs(msgspec.inspect.type_info(message)))
    assert found[0].cls is message
    assert [each.cls for each in found if each.forbid_unknown_fields] == []


FRAME: Schemas = {
    "Frame": {
        "type": "object",
        "properties": {"sequence": {"type": "integer"}, "reason": {"enum": ["stop", "length"], "default": "stop"}},
        "required": ["sequence"],
    },
    "Held": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer", "default": 0}], "minItems": 1},
    "Kind": {"enum": [1, 2]},
}
Change = Callable[[Schemas], object]


def fields(schemas: Schemas) -> Schemas:
    properties: Schemas = schemas["Frame"]["properties"]
    return properties


BROKEN: dict[str, tuple[Change, str]] = {
    "field removed": (lambda s: fields(s).pop("reason"), "Frame.reason: the field is gone"),
    "message renamed": (lambda s: s.update(Chunk=s.pop("Frame")), "Frame: the message is gone"),
    "a value more": (lambda s: fields(s)["reason"]["enum"].append("abort"), "Frame.reason: changed from {'enum'"),
    "default": (lambda s: fields(s)["reason"].update(default="length"), "Frame.reason: changed from"),
    "type": (lambda s: fields(s)["sequence"].update(type="number"), "Frame.sequence: changed from {'type': 'integer'}"),
    "left out": (lambda s: s["Frame"]["required"].clear(), "Frame.sequence: the field may be left out now"),
    "required": (
        lambda s: (fields(s).update(fresh={"type": "integer"}), s["Frame"]["required"].append("fresh")),
        "Frame.fresh: the field is required now",
    ),
    "order": (lambda s: s["Held"]["prefixItems"].reverse(), "Held: its fields were"),
    "position required": (lambda s: s["Held"].update(minItems=2), "Held: its fields were"),
    "other enumeration": (lambda s: s["Kind"]["enum"].append(3), "Kind: changed from {'enum': [1, 2]}"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_break_is_reported(change: Change, message: str) -> None:
    after = copy.deepcopy(FRAME)
    change(after)
    (found,) = breaks(FRAME, after)
    assert found.startswith(message)


def test_new_messages_and_fields_with_a_default_are_not_breaks() -> None:
    after = copy.deepcopy(FRAME)
    fields(after)["fresh"] = {"type": "integer", "default": 0}
    after["Held"]["prefixItems"].append({"type": "integer", "default": 0})
    after["New"] = {"type": "object", "properties": {}, "required": ["x"]}
    assert list(breaks(FRAME, after)) == []
