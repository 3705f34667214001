"""Objects of the last release stay valid, with the same meaning, in every served version; the schema only grows."""

from __future__ import annotations

import copy
import json
from typing import Any

import miniature_api_server as server
import pytest
import yaml
from additive import breaks
from freeze import OBJECTS, RELEASED, ROOT, SCHEMA, SERVED, fields_of, used

from pagemill_crds import GROUP, KIND, SERVED_VERSIONS, STORED_VERSION, VERSION
from pagemill_crds.generate import custom_resource_definition
from pagemill_crds.models import LLMDeployment
from pagemill_crds.schema import structural_schema
from pagemill_gateway.discovery.kubernetes.discovery import LLM_DEPLOYMENTS
from pagemill_operator.backends.kubernetes.kinds import LLM_DEPLOYMENT
from pagemill_operator.plan import make_plan

BEFORE: dict[str, Any] = json.loads((RELEASED / SCHEMA).read_text("utf-8"))
NOW = structural_schema()
RELEASED_VERSIONS: list[str] = json.loads((RELEASED / SERVED).read_text("utf-8"))
RELEASED_OBJECTS: list[dict[str, Any]] = [
    json.loads(line) for line in (RELEASED / OBJECTS).read_text("utf-8").splitlines()
]

_ANY_NAME = "every name of the former enumeration matches the pattern, and means the same"
REVIEWED: dict[tuple[str, str], str] = {
    (path, keyword): _ANY_NAME
    for path in ("spec.routing.policy", "spec.engine.speculative.method")
    for keyword in ("pattern", "maxLength", "minLength")
} | {
    ("spec.autoscaling.slo", "x-kubernetes-validations"): "one of three fields suffices, not of two",
    ("spec.engine.speculative", "x-kubernetes-validations"): "eagle3 may have a source; it is not refused without",
}
"""For the (field, keyword) of each break, the reason why everything accepted before stays valid with the same meaning.
"""


def in_version(document: dict[str, Any], version: str) -> dict[str, Any]:
    return {**copy.deepcopy(document), "apiVersion": f"{GROUP}/{version}"}


def test_the_schema_only_grew_since_the_last_release() -> None:
    found = {(each.path, each.keyword): str(each) for each in breaks(BEFORE, NOW)}
    assert [message for key, message in found.items() if key not in REVIEWED] == []
    assert REVIEWED.keys() <= found.keys(), "these reviewed breaks do not exist (any more)"


def test_all_versions_have_one_schema_and_one_is_stored() -> None:
    for text in ("crds/llmdeployments.yaml", "charts/pagemill/templates/crds/llmdeployments.yaml"):
        lines = [line for line in (ROOT / text).read_text("utf-8").splitlines() if "{{" not in line]
        spec = yaml.safe_load("\n".join(lines))["spec"]
        assert spec == custom_resource_definition()["spec"]
        assert [each["name"] for each in spec["versions"]] == list(SERVED_VERSIONS)
        assert [each["name"] for each in spec["versions"] if each["storage"]] == [STORED_VERSION]
        assert spec["conversion"] == {"strategy": "None"}
        parts = [{key: each[key] for key in each if key not in ("name", "storage")} for each in spec["versions"]]
        assert all(each == parts[0] for each in parts)


def test_versions_served_by_the_last_release_are_served() -> None:
    assert set(RELEASED_VERSIONS) <= set(SERVED_VERSIONS)


def test_the_stored_version_was_served_by_the_last_release() -> None:
    """Otherwise its CRD would be refused when the release is rolled back."""
    assert STORED_VERSION in RELEASED_VERSIONS


def test_programs_read_the_versions_that_the_last_release_served() -> None:
    assert (LLM_DEPLOYMENT.version, LLM_DEPLOYMENTS.version) == (STORED_VERSION, STORED_VERSION)
    assert LLM_DEPLOYMENT[:2] == LLM_DEPLOYMENTS[:2] == (KIND, GROUP)


def test_the_released_objects_use_every_field_of_their_release() -> None:
    assert {field for each in RELEASED_OBJECTS for field in used(each, BEFORE)} >= fields_of(BEFORE)


@pytest.mark.slow
def test_released_objects_stay_valid_in_every_version(admit: Any) -> None:
    for document in RELEASED_OBJECTS:
        assert server.admit(copy.deepcopy(document), BEFORE) == [], document
        for version in SERVED_VERSIONS:
            assert admit(in_version(document, version)) == [], (version, document)


def test_released_objects_are_stored_with_their_earlier_values() -> None:
    for document in RELEASED_OBJECTS:
        before = server.stored(document, BEFORE)
        assert as_known(server.stored(document, NOW), BEFORE) == before, document


def as_known(value: Any, schema: dict[str, Any]) -> Any:
    """Return the value without fields that the schema does not have."""
    if isinstance(value, list):
        return [as_known(item, schema.get("items", {})) for item in value]
    properties = schema.get("properties")
    if not properties or not isinstance(value, dict) or "metadata" in value.keys() - properties.keys():
        return value
    return {name: as_known(each, properties[name]) for name, each in value.items() if name in properties}


def test_an_object_has_the_same_meaning_in_every_version() -> None:
    for document in RELEASED_OBJECTS:
        first, *others = (LLMDeployment.model_validate(in_version(document, each)) for each in SERVED_VERSIONS)
        plan = make_plan(first, "kubernetes")
        for other in others:
            assert (other.spec, other.status, other.metadata) == (first.spec, first.status, first.metadata)
            assert make_plan(other, "kubernetes") == plan


def test_examples_name_the_newest_version() -> None:
    for path in (ROOT / "examples").rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            if document.get("kind") == KIND:
                assert document["apiVersion"] == f"{GROUP}/{VERSION}", path


@pytest.mark.parametrize("version", ["v1", "v1alpha2"])
def test_a_version_that_was_never_served_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"pagemill\.dev/v1beta1"):
        LLMDeployment.model_validate(in_version(RELEASED_OBJECTS[0], version))
