"""The Makefile explains itself, and CI runs what developers run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def targets(root: Path) -> list[str]:
    return re.findall(r"^\.PHONY: (\S+)$", (root / "Makefile").read_text(), re.MULTILINE)


def test_help_lists_every_target(root: Path) -> None:
    shown = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True, timeout=30).stdout
    listed = re.findall(r"^  make (\S+)", shown, re.MULTILINE)
    assert sorted(listed) == sorted(targets(root))
    assert all(re.search(rf"make {name}\s+\S", shown) for name in listed), "each has a description"


def test_the_expected_targets_exist(root: Path) -> None:
    wanted = {"up", "test", "lint", "format", "bench", "docs", "docs-check", "crds", "e2e", "clean", "chat", "lock"}
    assert wanted <= set(targets(root))


def test_a_bare_make_shows_the_help(root: Path) -> None:
    done = subprocess.run(["make"], cwd=root, capture_output=True, text=True, check=True, timeout=30)
    assert "make up" in done.stdout


def test_ci_runs_lint_test_and_the_cluster_smoke(root: Path) -> None:
    script = (root / ".ci/run").read_text()
    order = [script.index(f"make {name}") for name in ("lint", "test", "e2e")]
    assert order == sorted(order)
    assert "set -euo pipefail" in script
    subprocess.run(["bash", "-n", str(root / ".ci/run")], check=True, timeout=30)
    assert (root / ".ci/run").stat().st_mode & 0o111


def test_uv_is_pinned_to_the_version_that_wrote_the_lock(root: Path) -> None:
    assert re.search(r"^UV_VERSION := \d+\.\d+\.\d+$", (root / "Makefile").read_text(), re.MULTILINE)
