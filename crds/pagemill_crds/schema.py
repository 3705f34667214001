"""Convert pydantic's JSON schema to the structural schema that Kubernetes requires of a CustomResourceDefinition.

References are inlined; titles and nulls are dropped (the API server prunes nulls); constants become enumerations;
exclusive bounds take OpenAPI 3.0's form; `additionalProperties: false` is dropped (the API server validates fields).
Source: the Kubernetes documentation on CustomResourceDefinitions, "Specifying a structural schema".
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pagemill_crds.base import Section
from pagemill_crds.models import LLMDeployment

Schema = dict[str, Any]

_KEPT = (
    "description",
    "type",
    "format",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "maxItems",
    "maxProperties",
    "required",
)


@cache
def _pydantic_schema(resource: type[Section]) -> Schema:
    return resource.model_json_schema(by_alias=True)


def structural_schema(resource: type[Section] = LLMDeployment) -> Schema:
    """Return the `openAPIV3Schema` of a resource."""
    root = _pydantic_schema(resource)
    schema = _structural(root, root["$defs"])
    schema["properties"]["metadata"] = {"type": "object"}
    for name in ("apiVersion", "kind"):
        schema["properties"][name] = {"type": "string"}
    for rule in schema.get("x-kubernetes-validations", []):
        # The API server has no fields below metadata in its schema and would refuse a path there.
        rule.pop("fieldPath", None)
    schema["required"] = ["spec"]
    return schema


def _structural(node: Schema, defs: Schema) -> Schema:
    node = _resolved(node, defs)
    if node.get("x-kubernetes-int-or-string"):
        return _int_or_string(node)
    schema: Schema = {key: node[key] for key in _KEPT if key in node}
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    _bounds(node, schema)
    if "const" in node:
        schema["enum"] = [node["const"]]
    if "items" in node:
        schema["items"] = _structural(node["items"], defs)
    if "properties" in node:
        schema["properties"] = {name: _structural(child, defs) for name, child in node["properties"].items()}
    if isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = _structural(node["additionalProperties"], defs)
    schema |= {key: value for key, value in node.items() if key.startswith("x-kubernetes-")}
    if (default := _default(node)) is not None:
        schema["default"] = default
    return schema


def _resolved(node: Schema, defs: Schema) -> Schema:
    """Return the node without `$ref` and without the null branch of an optional field."""
    if "$ref" in node:
        target = defs[node["$ref"].rsplit("/", 1)[1]]
        # The field's own description and limits override those of its type.
        return {**_resolved(target, defs), **{key: value for key, value in node.items() if key != "$ref"}}
    if "anyOf" not in node or node.get("x-kubernetes-int-or-string"):
        return node
    (branch,) = [branch for branch in node["anyOf"] if branch.get("type") != "null"]
    rest = {key: value for key, value in node.items() if key != "anyOf"}
    return {**_resolved(branch, defs), **rest}


def _int_or_string(node: Schema) -> Schema:
    keys = ("anyOf", "x-kubernetes-int-or-string", "pattern", "minimum", "maxLength", "description")
    schema = {key: node[key] for key in keys if key in node}
    if node.get("default") is not None:
        schema["default"] = node["default"]
    return schema


def _bounds(node: Schema, schema: Schema) -> None:
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in node:
            schema[bound] = node[exclusive]
            schema[exclusive] = True


def _default(node: Schema) -> Any:
    default = node.get("default")
    if isinstance(default, dict) and "properties" in node:
        return {}  # the API server fills in the defaults of its fields
    return None if default in ([], {}, "") else default
