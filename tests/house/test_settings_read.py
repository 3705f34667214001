"""Every setting of engine, gateway and operator, and every value of the chart, is read by the code that it concerns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

SETTINGS = {
    "execution/pagemill_execution/config.py": ("execution", "engine"),
    "engine/pagemill_engine/config.py": ("engine", "execution", "libs"),
    "libs/routing/pagemill_routing/config.py": ("libs/routing", "gateway"),
    "gateway/pagemill_gateway/config.py": ("gateway", "libs"),
    "operator/pagemill_operator/config.py": ("operator",),
    "libs/servers/pagemill_servers/tracing/config.py": ("libs/servers",),
    "libs/servers/pagemill_servers/tls/config.py": ("libs/servers",),
    "libs/models/pagemill_models/tokenizer_files/generation_defaults.py": ("libs/models", "operator", "engine"),
}
"""Modules of settings -> the folders whose code reads them."""
AS_A_WHOLE = {"GenerationDefaults"}
"""Classes whose fields are read by their names, as the keys of a mapping."""


def fields_of(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ClassDef) and node.name not in AS_A_WHOLE:
            targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def values_of(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from values_of(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


@pytest.mark.parametrize("module", SETTINGS)
def test_every_setting_is_read(root: Path, module: str) -> None:
    paths = [path for folder in SETTINGS[module] for path in (root / folder).rglob("*.py") if path != root / module]
    names = set(re.findall(r"\.(\w+)", "\n".join(path.read_text() for path in paths)))
    inside = set(re.findall(r"self\.(\w+)", (root / module).read_text()))
    unread = [field for field in fields_of(root / module) if field not in names | inside]
    assert not unread, f"{module}: {unread}"


def test_every_value_of_the_chart_is_read_by_a_template(root: Path) -> None:
    chart = root / "charts" / "pagemill"
    templates = "\n".join(path.read_text() for path in (chart / "templates").rglob("*") if path.is_file())
    words = set(re.findall(r"\.(\w+)", templates))
    whole = set(re.findall(r"(?:with|toYaml) \S*\.(\w+)", templates)) | set(re.findall(r"\.(\w+) \| toYaml", templates))
    for path in values_of(yaml.safe_load((chart / "values.yaml").read_text())):
        *sections, name = path.split(".")
        assert name in words or whole & {*sections}, path
