"""Helm's programs check the chart: its unit tests pass, lint finds nothing, Helm 3 and 4 render the same objects."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.programs import find
from support.release import CHART

VARIANTS = sorted(path.name for path in (CHART / "ci").glob("*-values.yaml"))


def run(argv: list[str]) -> str:
    done = subprocess.run(argv, cwd=CHART, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def test_unit_tests_of_the_chart_pass() -> None:
    assert "failed" not in run([find("helm-unittest"), "--strict", "."]).splitlines()[-4]


@pytest.mark.parametrize("helm", ["helm", "helm3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_lint_finds_nothing(helm: str, variant: str) -> None:
    assert "0 chart(s) failed" in run([find(helm), "lint", "--strict", ".", "--values", f"ci/{variant}"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_helm_3_and_4_render_the_same(variant: str) -> None:
    def objects(helm: str) -> list[Any]:
        argv = [find(helm), "template", "pagemill", ".", "--namespace", "models", "--kube-version", "1.36"]
        return list(yaml.safe_load_all(run([*argv, "--values", f"ci/{variant}"])))

    assert objects("helm") == objects("helm3")


def test_the_package_contains_no_files_for_developers(tmp_path: Path) -> None:
    run([find("helm"), "package", ".", "--destination", str(tmp_path)])
    (package,) = tmp_path.glob("*.tgz")
    names = subprocess.run(["tar", "-tzf", package], capture_output=True, text=True, check=True).stdout.split()
    assert "pagemill/files/ask_gateway.py" in names
    assert "pagemill/templates/tests/ask-gateway.yaml" in names
    assert not any(name.startswith(("pagemill/ci/", "pagemill/tests/")) for name in names)
