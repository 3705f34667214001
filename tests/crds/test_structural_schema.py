"""The schema follows Kubernetes' rules for structural schemas, which the API server checks at creation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import cel
import pytest

from pagemill_crds.schema import structural_schema

SCHEMA = structural_schema()
FORBIDDEN = {"$ref", "$defs", "title", "const", "oneOf", "allOf", "not", "definitions", "dependencies", "deprecated"}
FORBIDDEN |= {"patternProperties", "additionalItems", "readOnly", "writeOnly", "examples", "nullable", "$id", "id"}
TYPES = {"object", "array", "string", "integer", "number", "boolean"}


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


NODES = dict(nodes(SCHEMA))


def test_every_node_has_a_type_or_is_int_or_string() -> None:
    for path, node in NODES.items():
        if node.get("x-kubernetes-int-or-string"):
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
            assert "type" not in node, path
        else:
            assert node.get("type") in TYPES, path
            assert "anyOf" not in node, path


def test_no_keyword_is_forbidden() -> None:
    for path, node in NODES.items():
        assert not FORBIDDEN & node.keys(), path


def test_properties_and_additional_properties_exclude_each_other() -> None:
    for path, node in NODES.items():
        assert not {"properties", "additionalProperties"} <= node.keys(), path
        assert node.get("additionalProperties") is not False, path


def test_arrays_declare_their_items_and_a_maximum() -> None:
    for path, node in NODES.items():
        if node.get("type") == "array":
            assert "items" in node, path
            assert "maxItems" in node or path == ".status.plan.notes", path


def test_list_map_keys_are_required_scalars_of_the_items() -> None:
    for path, node in NODES.items():
        for key in node.get("x-kubernetes-list-map-keys", []):
            assert key in node["items"]["required"], path
            assert node["items"]["properties"][key]["type"] == "string", path


def test_required_fields_exist_and_have_no_default() -> None:
    for path, node in NODES.items():
        for name in node.get("required", []):
            assert "default" not in node["properties"][name], f"{path}.{name}"


def test_exclusive_bounds_are_booleans_next_to_a_bound() -> None:
    for path, node in NODES.items():
        for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if exclusive in node:
                assert node[exclusive] is True, path
                assert bound in node, path


def test_metadata_is_validated_by_the_api_server_only() -> None:
    assert SCHEMA["properties"]["metadata"] == {"type": "object"}


def test_only_parts_of_the_pod_template_keep_unknown_fields() -> None:
    free = [path for path, node in NODES.items() if node.get("x-kubernetes-preserve-unknown-fields")]
    assert free == [".spec.template.spec"]


@pytest.mark.parametrize(
    "path", [path for path in NODES if path.startswith(".spec") and not path.endswith(("[]", "{}"))]
)
def test_every_field_of_the_spec_is_described(path: str) -> None:
    assert NODES[path].get("description"), path


def test_rules_compile_and_use_fields_that_exist() -> None:
    for path, node in NODES.items():
        for rule in node.get("x-kubernetes-validations", []):
            cel.compile(rule["rule"])
            assert rule["message"], path
            if "fieldPath" in rule:
                assert f"{path}{rule['fieldPath']}" in NODES, rule


def test_strings_in_rules_are_bounded_which_bounds_the_cost() -> None:
    for path, node in NODES.items():
        for rule in node.get("x-kubernetes-validations", []):
            for name in re.findall(r"self\.(\w+)\.(?:matches|contains|startsWith|all)\(", rule["rule"]):
                child = node["properties"][name]
                assert "maxLength" in child or "maxItems" in child, f"{path}.{name}"
