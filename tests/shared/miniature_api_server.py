"""A minimal API server: it prunes nulls, refuses unknown fields, sets defaults, and checks schema and CEL rules.

e2e/crd tests the same documents with a real API server.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import cel
import jsonschema

Schema = dict[str, Any]
Document = dict[str, Any]


def admit(document: Document, schema: Schema) -> list[str]:
    """Return the errors of a document; empty if the API server would accept it."""
    value = _prune_nulls(document, schema)
    metadata = value.pop("metadata", {"name": "x"})
    errors = list(_unknown(value, schema, ""))
    fill_defaults(value, schema)
    # OpenAPI 3.0's exclusive bounds are booleans, as in JSON schema's draft 4.
    errors += [f"{list(e.path)}: {e.message}" for e in jsonschema.Draft4Validator(schema).iter_errors(value)]
    return errors or list(_broken_rules({**value, "metadata": metadata}, schema, ""))


def stored(document: Document, schema: Schema) -> Document:
    """Return the document as the API server would store it."""
    value: Document = _prune_nulls(copy.deepcopy(document), schema)
    fill_defaults(value, schema)
    return value


def fill_defaults(value: Any, schema: Schema) -> None:
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if name not in value and "default" in child:
                value[name] = copy.deepcopy(child["default"])
            if name in value:
                fill_defaults(value[name], child)
    if isinstance(value, list):
        for item in value:
            fill_defaults(item, schema.get("items", {}))


def _prune_nulls(value: Any, schema: Schema) -> Any:
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, dict):
        children = schema.get("properties", {})
        other = schema.get("additionalProperties", {})
        return {k: _prune_nulls(v, children.get(k, other)) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_prune_nulls(item, schema.get("items", {})) for item in value]
    return value


def _unknown(value: Any, schema: Schema, path: str) -> Iterator[str]:
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, dict) and "properties" in schema and schema["properties"]:
        for name, child in value.items():
            if name not in schema["properties"]:
                yield f"{path}.{name}: unknown field"
            else:
                yield from _unknown(child, schema["properties"][name], f"{path}.{name}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(item, schema.get("items", {}), f"{path}[{index}]")


def _broken_rules(value: Any, schema: Schema, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"] and not _compiled(rule["rule"]).execute({"self": value}):
            yield f"{path}: {rule['message']}"
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if name in value:
                yield from _broken_rules(value[name], child, f"{path}.{name}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(item, schema.get("items", {}), f"{path}[{index}]")


@cache
def _compiled(rule: str) -> cel.Program:
    return cel.compile(rule)
