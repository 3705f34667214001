"""The cores that a container or a service manager grants, with both versions of cgroups and at any depth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagemill_servers.process.cgroup import folders, usable_cores


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


def group(folder: Path, quota_us: int | str, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota_us} 100000\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")


def cores(root: Path, membership: str) -> int:
    (root / "membership").write_text(membership)
    return usable_cores(root, root / "membership")


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(
    ("quota_us", "expected"), [("max", 16), (100_000, 1), (350_000, 3), (10_000, 1), (6_400_000, 16), ("", 16)]
)
def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, quota_us: int | str, expected: int) -> None:
    group(tmp_path, quota_us)
    assert cores(tmp_path, "0::/\n") == expected


@pytest.mark.usefixtures("many_cores")
def test_the_smallest_quota_of_all_ancestors_applies(tmp_path: Path) -> None:
    group(tmp_path / "a/b/c", "max")
    group(tmp_path / "a/b", 800_000)
    group(tmp_path / "a", 400_000)
    group(tmp_path / "other", 100_000)
    assert cores(tmp_path, "0::/a/b/c\n") == 4


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_version_1_has_a_hierarchy_for_each_controller(tmp_path: Path, folder: str) -> None:
    group(tmp_path / folder, -1, version=1)
    group(tmp_path / folder / "docker/x", 200_000, version=1)
    assert cores(tmp_path, "9:memory:/elsewhere\n4:cpu,cpuacct:/docker/x\n0::/\n") == 2
    assert cores(tmp_path, "9:memory:/docker/x\n4:cpu,cpuacct:/\n0::/\n") == 16


@pytest.mark.usefixtures("many_cores")
def test_groups_outside_of_the_visible_hierarchy_are_ignored(tmp_path: Path) -> None:
    assert cores(tmp_path, "0::/../../outside\n") == 16
    assert usable_cores(tmp_path / "absent", tmp_path / "absent") == 16
    assert folders("memory", tmp_path, tmp_path / "absent")[0] == tmp_path


def test_without_a_smaller_quota_the_cpu_affinity_applies() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
