"""Freezes the resource as a release publishes it: its schema, its versions, and objects that use every field.

`make release-freeze` writes them to `tests/crds/released/` when a version is released (docs/how-to/release.md),
together with the schemas of `wire_messages`; `test_released_objects.py` then compares later versions with them. Only a
release may write there: a frozen object stays valid for as long as its version is served.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import miniature_api_server as server
import wire_messages
import yaml

from pagemill_crds import API_VERSION, KIND, SERVED_VERSIONS
from pagemill_crds.schema import structural_schema

ROOT = Path(__file__).resolve().parents[2]
RELEASED = Path(__file__).resolve().parent / "released"
SCHEMA, OBJECTS, SERVED = "schema.json", "objects.jsonl", "served.json"

Schema = dict[str, Any]
Document = dict[str, Any]

TEXTS = (
    *("x", "a-b.c", "Abc-1", "A_B", "auto", "none", "TargetTracking", "x-session-id", "NVIDIA-L4", "/models"),
    *("hf://org/name", "org/name@main", "hf://org/name/model.Q4_K_M.gguf", "oci://host/name:tag", "s3://bucket/prefix"),
    *("pvc://claim/path", "file:///model", "package://dist/model.gguf", "registry.example/pagemill/engine:1.0"),
    *("1", "1.5", "500m", "8Gi", "1500Mi", "30s", "1h30m", "25%", "--flag", "--name=value"),
    *("two words", ""),
)
MANY_TEXTS = 15
TIME = "2026-01-01T00:00:00Z"
CONTEXTS: tuple[Document, ...] = (
    {},
    {"engine": {"env": [{"name": "A", "value": "1"}]}},
    {"engine": {"speculative": {"method": "draft", "source": "hf://org/draft"}}},
    {"engine": {"maxModelLen": 8192, "maxNumBatchedTokens": 1_000_000, "maxNumSeqs": 1}},
    {"resources": {"gpus": 1}},
    {"resources": {"gpus": 8}, "engine": {"tensorParallel": 8}},
    {"model": {"source": "hf://org/name", "cache": {"size": "10Gi"}}},
    {"model": {"source": "hf://org/name", "cache": {"hostPath": "/var/cache"}}},
    {"model": {"source": "oci://host/name:tag", "cache": {}}},
    {"autoscaling": {"maxReplicas": 4, "minReplicas": 0}},
    {"autoscaling": {"maxReplicas": 1000, "minReplicas": 1}},
    {"autoscaling": {"maxReplicas": 4, "mode": "External"}},
    {"rollout": {"maxSurge": 1, "maxUnavailable": 1}},
)
"""Specs in which fields are valid that are not valid in others."""


def documents(schema: Schema) -> Iterator[Document]:
    """Yield the examples, and for every field of the schema objects with its possible values."""
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        yield from (each for each in yaml.safe_load_all(path.read_text("utf-8")) if each.get("kind") == KIND)
    seen: set[str] = set()
    for steps, node in _fields(schema):
        for value in _values(node):
            document = _first_admitted(steps, value, schema)
            if document is not None and (text := json.dumps(document)) not in seen:
                seen.add(text)
                yield document


def fields_of(schema: Schema) -> set[str]:
    """Return dotted paths of all fields below spec and status."""
    return {".".join(steps) for steps, _ in _fields(schema)}


def used(document: Any, schema: Schema, path: str = "") -> Iterator[str]:
    """Yield dotted paths of the fields that a document sets."""
    for item in document if isinstance(document, list) else ():
        yield from used(item, schema["items"], f"{path}.[]")
    for name, child in schema.get("properties", {}).items():
        if isinstance(document, dict) and name in document:
            field = f"{path}.{name}" if path else name
            yield field
            yield from used(document[name], child, field)


def _fields(schema: Schema, steps: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    for name, child in schema.get("properties", {}).items():
        if steps or name in ("spec", "status"):
            yield (*steps, name), child
            yield from _fields(child, (*steps, name))
    if "items" in schema:
        yield from _fields(schema["items"], (*steps, "[]"))


def _first_admitted(steps: tuple[str, ...], value: Any, schema: Schema) -> Document | None:
    for context in CONTEXTS:
        spec = {"model": {"source": "package://dist/model.gguf"}, **copy.deepcopy(context)}
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "x"}, "spec": spec}
        _place(document, schema, steps, value)
        if not server.admit(copy.deepcopy(document), schema):
            return document
    return None


def _place(node: Any, schema: Schema, steps: tuple[str, ...], value: Any) -> None:
    name, rest = steps[0], steps[1:]
    if name == "[]":
        node[:] = node or [_least(schema["items"])]
        _place(node[0], schema["items"], rest, value)
        return
    child = schema["properties"][name]
    if rest:
        _place(node.setdefault(name, _least(child)), child, rest, value)
    elif isinstance(node.get(name), dict) and isinstance(value, dict):
        node[name] |= value
    else:
        node[name] = value


def _least(schema: Schema) -> Any:
    """Return the smallest value, with required fields only."""
    if "properties" in schema:
        return {name: _least(schema["properties"][name]) for name in schema.get("required", [])}
    return [] if schema.get("type") == "array" else next(_values(schema))


def _values(schema: Schema) -> Iterator[Any]:
    kind = schema.get("type")
    if "enum" in schema:
        yield from schema["enum"]
    elif schema.get("x-kubernetes-int-or-string"):
        yield from (1, 0, *_texts(schema))
    elif kind == "boolean":
        yield from (True, False)
    elif kind in ("integer", "number"):
        yield from _numbers(schema)
    elif kind == "string":
        yield from _texts(schema)
    elif kind == "array":
        yield from ([_least(schema["items"])], [])
    elif "additionalProperties" in schema:
        yield from ({"key": value} for value in _values(schema["additionalProperties"]))
    elif schema.get("x-kubernetes-preserve-unknown-fields"):
        yield {"nodeSelector": {"zone": "a"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    else:
        yield _least(schema)


def _numbers(schema: Schema) -> Iterator[float]:
    low, high = schema.get("minimum", 0), schema.get("maximum", 1000)
    step = 1 if schema["type"] == "integer" else (high - low) / 4
    yield from (low + step * bool(schema.get("exclusiveMinimum")), high - step * bool(schema.get("exclusiveMaximum")))
    yield from (value for value in (low + 2 * step, schema.get("default")) if value is not None and value < high)


def _texts(schema: Schema) -> Iterator[str]:
    if schema.get("format") == "date-time":
        yield TIME
        return
    pattern, longest = re.compile(schema.get("pattern", "")), schema.get("maxLength", 64)
    good = [text for text in TEXTS if schema.get("minLength", 0) <= len(text) <= longest and pattern.search(text)]
    # Nearly every text is valid, so more than a few values would test nothing new.
    yield from good if len(good) < MANY_TEXTS else good[:2]
    if pattern.search("a" * min(longest, 256)):
        yield "a" * min(longest, 256)


def _without_descriptions(schema: Any) -> Any:
    """Return the schema without descriptions, which the additive rule ignores."""
    if isinstance(schema, list):
        return [_without_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_descriptions(child) for name, child in value.items()}
        if key == "properties"
        else _without_descriptions(value)
        for key, value in schema.items()
        if key != "description"
    }


def main() -> int:
    schema = _without_descriptions(structural_schema())
    RELEASED.mkdir(exist_ok=True)
    (RELEASED / SCHEMA).write_text(json.dumps(schema, indent=1) + "\n", "utf-8")
    (RELEASED / SERVED).write_text(json.dumps(list(SERVED_VERSIONS)) + "\n", "utf-8")
    lines = [json.dumps(each, separators=(",", ":")) + "\n" for each in documents(schema)]
    (RELEASED / OBJECTS).write_text("".join(lines), "utf-8")
    wire_messages.freeze()
    sys.stdout.write(f"{len(lines)} objects, {len(fields_of(schema))} fields, versions {', '.join(SERVED_VERSIONS)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
