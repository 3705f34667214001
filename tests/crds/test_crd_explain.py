"""`explain` finds fields by path, describes them with their limits, and suggests similar names."""

from __future__ import annotations

import pytest

from pagemill_crds.explain import UnknownField, describe, find, root, walk
from pagemill_crds.generate import reference_page


def test_a_field_is_described_with_type_bounds_and_meaning() -> None:
    text = describe(find("llmdeployment.spec.engine.maxModelLen"))
    assert "llmdeployment.spec.engine.maxModelLen <integer>" in text
    assert "number of tokens of prompt and output together" in text
    assert "at least: 16" in text


@pytest.mark.parametrize("path", ["spec.engine", "llmd.spec.engine", "LLMDeployments.spec.engine", ".spec.engine"])
def test_short_and_plural_names_are_accepted(path: str) -> None:
    assert find(path).path == "llmdeployment.spec.engine"


def test_paths_through_lists_are_accepted() -> None:
    assert find("spec.engine.env.name").type == "string"
    assert find("spec.model.aliases").type == "[]string"
    assert find("spec.template.metadata.labels").type == "map of string"


def test_for_a_wrong_name_the_most_similar_one_is_suggested() -> None:
    with pytest.raises(UnknownField, match="did you mean maxModelLen"):
        find("spec.engine.maxModelLength")


def test_sections_show_rules_choices_and_required_fields() -> None:
    text = describe(find("spec.autoscaling"))
    assert "minReplicas must not exceed maxReplicas" in text
    assert "maxReplicas <integer> -required-" in text
    assert "one of: Active, Advisory, External" in describe(find("spec.autoscaling.mode"))


def test_the_reference_page_has_every_field() -> None:
    page = reference_page()
    for field in walk(root()):
        assert f"`{field.name.removesuffix('[]')}`" in page or field.path == "llmdeployment", field.path
