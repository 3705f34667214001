"""CI uses the machine's Go only if it is new enough for every program of the test cluster."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from waiting import WAIT_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


def suffices(folder: Path, version: str) -> bool:
    """Whether `go_suffices` of `.ci/run` accepts a Go of that version."""
    (folder / "go").write_text(f"#!/bin/sh\necho '{version}'\n")
    (folder / "go").chmod(0o755)
    function = re.search(r"^go_suffices\(\) \{\n.*?^\}$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE | re.DOTALL)
    assert function is not None
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    argv = ["bash", "-euc", f"{function[0]}\nif go_suffices; then echo yes; else echo no; fi"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=WAIT_LIMIT_S, check=True)
    return done.stdout == "yes\n"


def highest() -> tuple[int, int, int]:
    modules = (ROOT / "e2e" / "cluster" / "modules").glob("*/go.mod")
    found = [re.search(r"^go (\d+)\.(\d+)\.(\d+)$", path.read_text(), re.MULTILINE) for path in modules]
    return max((int(each[1]), int(each[2]), int(each[3])) for each in found if each)


def test_the_required_version_and_newer_ones_are_used(tmp_path: Path) -> None:
    major, minor, patch = highest()
    for version in (f"{major}.{minor}.{patch}", f"{major}.{minor}.{patch + 10}", f"{major}.{minor + 1}.0"):
        assert suffices(tmp_path, f"go{version}"), version
    assert suffices(tmp_path, f"go{major}.{minor}.{patch} X:jsonv2"), "built with experiments"


@pytest.mark.parametrize("version", ["go1.9", "go1.19.8", "go1.26.0", ""])
def test_older_and_broken_versions_are_not_used(tmp_path: Path, version: str) -> None:
    assert not suffices(tmp_path, version)


@pytest.mark.parametrize("target", ["e2e", "e2e-full", "e2e-scale", "e2e-measure"])
def test_make_finds_the_go_that_ci_installed(target: str) -> None:
    argv = ["make", "--dry-run", "--print-data-base", target]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert re.search(rf"^{target}: PATH := {re.escape(str(ROOT))}/\.uv/bin:", done.stdout, re.MULTILINE)
