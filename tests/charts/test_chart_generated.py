"""The schema, the tables and the CRD template match their sources, and the generator validates its input."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from loaded_file import module_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generate() -> Any:
    return module_of(ROOT / "charts" / "generate.py", "charts_generate")


def schema_for(generate: Any, text: str) -> dict[str, Any]:
    schema: dict[str, Any] = generate.schema_of(yaml.compose(text), text.splitlines())
    return schema


def test_generated_files_match_their_sources() -> None:
    done = subprocess.run(
        [sys.executable, "charts/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_file_edited_by_hand_is_detected(generate: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("edited")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "outputs", lambda: {page: "generated"})
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert page.read_text() == "generated"
    assert generate.main(["--chekc"]) == 2


def test_types_are_derived_from_defaults_and_comments(generate: Any) -> None:
    schema = schema_for(
        generate,
        "# Pods.\n# @schema {minimum: 0}\nreplicas: 2\n"
        "# Names.\n# @schema {$type: strings}\nnames: []\n"
        "block:\n  # A switch,\n  # in two lines.\n  enabled: true\n",
    )
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert properties["replicas"] == {"description": "Pods.", "type": "integer", "minimum": 0, "default": 2}
    assert properties["names"]["items"] == {"type": "string"}
    assert properties["block"]["properties"]["enabled"]["description"] == "A switch, in two lines."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Empty.\nempty: {}\n", "say what may stand in it"),
        ("# Nothing.\nnothing:\n", "has no type"),
        ("# Odd.\n# @schema {$type: lables}\nodd: {}\n", "there is no \\$type 'lables'"),
    ],
)
def test_a_value_without_a_type_is_refused(generate: Any, text: str, message: str) -> None:
    with pytest.raises(generate.ValuesError, match=message):
        schema_for(generate, text)


def test_a_value_without_documentation_is_refused(generate: Any) -> None:
    with pytest.raises(generate.ValuesError, match=r"block\.silent has no documentation"):
        list(generate.rows_of(yaml.compose("block:\n  silent: 1\n"), ["block:", "  silent: 1"]))


def test_braces_in_the_definition_are_not_template_expressions(generate: Any) -> None:
    assert '{{ "{{" }} name }}' in generate.crd_template("metadata:\n  note: '{{ name }}'\n")


def test_the_schema_is_valid_and_accepts_the_defaults(chart_folder: Path) -> None:
    schema = json.loads((chart_folder / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft7Validator(schema).validate(yaml.safe_load((chart_folder / "values.yaml").read_text()))


def test_the_chart_has_the_version_of_its_components(chart_folder: Path) -> None:
    chart = yaml.safe_load((chart_folder / "Chart.yaml").read_text())
    for component in ("operator", "gateway", "engine"):
        project = tomllib.loads((ROOT / component / "pyproject.toml").read_text())["project"]
        assert chart["appVersion"] == project["version"]


def test_the_catalogue_annotations_are_valid_yaml(chart_folder: Path) -> None:
    annotations = yaml.safe_load((chart_folder / "Chart.yaml").read_text())["annotations"]
    example = yaml.safe_load(annotations["artifacthub.io/crdsExamples"])[0]
    assert example["kind"] == yaml.safe_load(annotations["artifacthub.io/crds"])[0]["kind"] == "LLMDeployment"
    assert "artifacthub.io/images" not in annotations, "no images are published yet"
