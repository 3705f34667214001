"""The files generated from the models are current, and the CRD is what Kubernetes and its tools expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pagemill_crds.generate import ROOT, custom_resource_definition, main, outputs, stale_files

CRD = custom_resource_definition()
VERSION = CRD["spec"]["versions"][0]


def test_generated_files_equal_the_models() -> None:
    assert stale_files() == [], "run `python -m pagemill_crds.generate`"


def test_check_mode_fails_on_an_outdated_file(tmp_path: Path) -> None:
    for path, text in outputs(tmp_path).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    assert stale_files(tmp_path) == []
    drifted = tmp_path / "crds" / "llmdeployments.yaml"
    drifted.write_text(drifted.read_text("utf-8").replace("maximum: 1000", "maximum: 1001", 1), "utf-8")
    assert stale_files(tmp_path) == [drifted]


def test_the_exit_code_of_check_mode_depends_on_its_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert main(["--chekc"]) == 2
    assert "--check" in capsys.readouterr().err


def test_the_yaml_is_parsed_into_the_same_object() -> None:
    assert yaml.safe_load((ROOT / "crds" / "llmdeployments.yaml").read_text("utf-8")) == CRD


def test_the_resource_has_its_names() -> None:
    names = CRD["spec"]["names"]
    assert CRD["metadata"]["name"] == "llmdeployments.pagemill.dev"
    assert names["shortNames"] == ["llmd"]
    assert names["categories"] == ["pagemill"]
    assert "all" not in names["categories"]


def test_an_autoscaler_finds_the_pods_through_scale() -> None:
    scale = VERSION["subresources"]["scale"]
    assert scale["labelSelectorPath"] == ".status.selector"
    for path in scale.values():
        assert _at(path)["type"] in ("integer", "string")


@pytest.mark.parametrize("column", VERSION["additionalPrinterColumns"], ids=lambda column: str(column["name"]))
def test_printer_columns_show_existing_fields(column: dict[str, str]) -> None:
    path = column["jsonPath"]
    if path.startswith(".metadata"):
        return
    if "conditions[" in path:
        assert "reason" in _at(".status.conditions")["items"]["properties"]
        return
    assert _at(path)["type"] == column["type"]


def test_the_columns_are_the_documented_ones() -> None:
    columns = VERSION["additionalPrinterColumns"]
    always = [column["name"] for column in columns if "priority" not in column]
    assert always == ["MODEL", "READY", "DESIRED", "KV%", "QUEUE", "REASON", "AGE"]
    assert [column["name"] for column in columns if column.get("priority") == 1] == ["VERSION", "URL"]


def test_conditions_are_a_list_map_by_type() -> None:
    conditions = _at(".status.conditions")
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    required = {"type", "status", "lastTransitionTime", "reason", "message"}
    assert required <= set(conditions["items"]["required"])


def _at(path: str) -> dict[str, Any]:
    node = VERSION["schema"]["openAPIV3Schema"]
    for name in path.strip(".").split("."):
        node = node["properties"][name]
    assert isinstance(node, dict)
    return node
