"""Every target of the Makefile has a description, and CI runs the developers' targets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from waiting import WAIT_LIMIT_S


def targets(root: Path) -> list[str]:
    return re.findall(r"^\.PHONY: (\S+)$", (root / "Makefile").read_text(), re.MULTILINE)


def test_help_lists_every_target(root: Path) -> None:
    shown = subprocess.run(
        ["make", "help"], cwd=root, capture_output=True, text=True, check=True, timeout=WAIT_LIMIT_S
    ).stdout
    listed = re.findall(r"^  make (\S+)", shown, re.MULTILINE)
    assert sorted(listed) == sorted(targets(root))
    assert all(re.search(rf"make {name}\s+\S", shown) for name in listed), "each target must have a description"


def test_the_expected_targets_exist(root: Path) -> None:
    wanted = {"up", "test", "lint", "format", "bench", "docs", "docs-check", "crds", "e2e", "clean", "chat", "lock"}
    assert wanted <= set(targets(root))


def test_every_test_that_a_file_names_exists(root: Path) -> None:
    """A renamed test would otherwise fail only where its old name is used, in a target that developers seldom run."""
    pages = sorted((root / "docs").rglob("*.md"))
    named = {
        (place.relative_to(root), root / file, name)
        for place in (root / "Makefile", root / ".ci/run", root / "README.md", root / "CONTRIBUTING.md", *pages)
        for file, name in re.findall(r"([\w./-]+\.py)::(\w+)", place.read_text())
    }
    assert Path("Makefile") in {place for place, _, _ in named}
    for place, file, name in sorted(named):
        assert file.is_file(), f"{place} names {file}"
        assert re.search(rf"^ *(async )?def {name}\(", file.read_text(), re.MULTILINE), f"{place} names {file}::{name}"
    for place in ("Makefile", ".ci/run"):
        assert not re.search(r"pytest\b.* -k ", (root / place).read_text()), f"{place}: name tests as FILE::TEST"


def test_every_file_of_the_order_of_tests_exists(root: Path) -> None:
    names = re.findall(r'^    "([\w/]+/test_\w+\.py)",$', (root / "tests/conftest.py").read_text(), re.MULTILINE)
    assert len(names) > 20
    assert [name for name in names if not (root / "tests" / name).is_file()] == []


def test_make_without_a_target_shows_the_help(root: Path) -> None:
    done = subprocess.run(["make"], cwd=root, capture_output=True, text=True, check=True, timeout=WAIT_LIMIT_S)
    assert "make up" in done.stdout


def test_ci_runs_lint_test_and_the_cluster_smoke(root: Path) -> None:
    script = (root / ".ci/run").read_text()
    order = [script.index(f'phase "{name}"') for name in ("lint", "test", "e2e")]
    assert all(f"make {name}" in script for name in ("lint", "test", "e2e"))
    assert order == sorted(order)
    assert "set -euo pipefail" in script
    subprocess.run(["bash", "-n", str(root / ".ci/run")], check=True, timeout=WAIT_LIMIT_S)
    assert (root / ".ci/run").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("phase", "status", "last_line"),
    [
        ("true", 0, r"ci: passed in \d+ s"),
        ("false", 1, r"ci: FAILED in only \(exit code 1\) after \d+ s"),
        ("bash -c 'kill -TERM $PPID'", 143, r"ci: FAILED in only \(exit code 143\) after \d+ s"),
    ],
)
def test_ci_passes_only_if_its_last_phase_has_finished(
    phase: str, status: int, last_line: str, root: Path, tmp_path: Path
) -> None:
    script = re.sub(r"^(phase .*|start_preparing)\n", "", (root / ".ci/run").read_text(), flags=re.MULTILINE)
    before, end = script.rsplit("current=end", 1)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(f"{before}phase only {phase}\ncurrent=end{end}")
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert re.fullmatch(last_line, done.stdout.splitlines()[-1])


def test_uv_is_verified_by_hash(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    assert "INSTALL_UV := install --quiet --disable-pip-version-check --require-hashes -r release/uv.txt\n" in makefile
    assert len(re.findall(r"-m pip .*\$\(INSTALL_UV\)", makefile)) == len(re.findall(r"^\.uv/bin/uv:", makefile, re.M))
