"""Schemas of the messages between engine, gateway, operator and command line, and the rule by which they may change.

`tests/crds/freeze.py` stores them for a release, and tests compare the current ones with them. The rule is stricter
than that of the custom resource: peers of both releases read a message, so both must know its values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_operator.autoscaler.records import Record
from pagemill_protocol.catalog import Catalog
from pagemill_protocol.report.load import LoadFrame
from pagemill_protocol.report.state import StateFrame
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

RELEASED = Path(__file__).resolve().parents[1] / "protocol" / "released" / "messages.json"
MESSAGES = (GenerateRequest, FrameMeta, StateFrame, TokenizerBundle, LoadFrame, Catalog, Record)
SETTINGS = (EngineConfig, ServerConfig)
"""Settings that an operator writes for engines, whose image may be of either release.

The operator writes only values that are set. So an older engine gets an unknown field only if a user set it, and may
refuse it by name.
"""
REMEDY = "peers of the last release would refuse it or read it otherwise; add a field with a default beside it"

Schemas = dict[str, Any]


def schemas() -> Schemas:
    """Return JSON schemas of the messages and their parts by name, without descriptions."""
    _, components = msgspec.json.schema_components((*MESSAGES, *SETTINGS), ref_template="{name}")
    # The form after reading, because defaults may be tuples.
    found: Schemas = json.loads(json.dumps(components, sort_keys=True))
    return {name: _without_words(component) for name, component in found.items()}


def freeze() -> None:
    RELEASED.parent.mkdir(exist_ok=True)
    RELEASED.write_text(json.dumps(schemas(), indent=1) + "\n", "utf-8")


def breaks(before: Schemas, after: Schemas) -> Iterator[str]:
    """Yield every change that a peer of the other release cannot accept."""
    for name, old in before.items():
        if name not in after:
            yield f"{name}: the message is gone or has another name here; list the change as reviewed if it is a rename"
        elif old.get("type") == "array":
            yield from _array(name, old, after[name])
        elif old.get("type") == "object":
            yield from _object(name, old, after[name])
        elif old != after[name]:
            yield f"{name}: changed from {old} to {after[name]}; {REMEDY}"


def _object(name: str, old: Schemas, new: Schemas) -> Iterator[str]:
    fields = new.get("properties", {})
    for field, schema in old.get("properties", {}).items():
        if field not in fields:
            yield f"{name}.{field}: the field is gone; keep it, with its default"
        elif fields[field] != schema:
            yield f"{name}.{field}: changed from {schema} to {fields[field]}; {REMEDY}"
    for field in sorted(set(old.get("required", [])) ^ set(new.get("required", []))):
        change = "is required now" if field in new.get("required", []) else "may be left out now"
        yield f"{name}.{field}: the field {change}, which older peers do not know; a new one needs a default"


def _array(name: str, old: Schemas, new: Schemas) -> Iterator[str]:
    """Yield breaks of arrays, whose fields are identified by position; new ones must come last."""
    before, after = old.get("prefixItems", []), new.get("prefixItems", [])
    if after[: len(before)] != before or old.get("minItems") != new.get("minItems"):
        yield f"{name}: its fields were {before}, are {after}; add new ones at the end, with a default"


def _without_words(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_words(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "object" and "properties" in schema:
        fields = {name: _without_words(child) for name, child in schema["properties"].items()}
        return {**_without_words({k: v for k, v in schema.items() if k != "properties"}), "properties": fields}
    return {key: _without_words(value) for key, value in schema.items() if key not in ("title", "description")}
