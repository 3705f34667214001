"""Versions agree, a bump changes them everywhere, and the workflows are pinned."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from loaded_file import module_of

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


VERSIONS = module_of(ROOT / "release" / "versions.py", "versions")
KREW = module_of(ROOT / "release" / "krew.py", "krew")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy only the files that contain the version."""
    paths = [*VERSIONS.projects(), ROOT / "charts/pagemill/Chart.yaml", ROOT / "CHANGELOG.md"]
    for path in paths:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


def test_all_places_have_one_version_and_sibling_packages_are_pinned_to_it() -> None:
    assert VERSIONS.agreed() == VERSIONS.released()[0] if VERSIONS.released() else VERSIONS.agreed()
    assert VERSIONS.unpinned() == []


def test_the_lock_has_the_version_of_every_member() -> None:
    locked = {each["name"]: each["version"] for each in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    names = [tomllib.loads(path.read_text())["project"]["name"] for path in VERSIONS.projects()]
    assert {locked[name] for name in names} == {VERSIONS.agreed()}


def test_a_bump_changes_every_place_and_the_tag_can_be_released(copy: Path) -> None:
    before = VERSIONS.written(copy)
    VERSIONS.set_everywhere("7.8.9rc1", copy, today="2030-01-02")
    assert VERSIONS.written(copy) == dict.fromkeys(before, "7.8.9rc1")
    assert VERSIONS.check_tag("v7.8.9rc1", copy) == "7.8.9rc1"
    assert "## [7.8.9rc1] - 2030-01-02" in (copy / "CHANGELOG.md").read_text()
    with pytest.raises(VERSIONS.VersionError, match=r"is not `v7.8.9rc1`"):
        VERSIONS.check_tag("v7.8.9", copy)


def test_a_place_with_another_version_is_named(copy: Path) -> None:
    VERSIONS.set_everywhere("7.8.9", copy)
    path = copy / "cli" / "pyproject.toml"
    path.write_text(path.read_text().replace("pagemill-engine==7.8.9", "pagemill-engine==7.8.8"))
    with pytest.raises(VERSIONS.VersionError, match=r"cli/pyproject.toml: pagemill-engine"):
        VERSIONS.agreed(copy)


def test_the_install_of_uv_uses_the_hashes_of_the_lock() -> None:
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    (uv,) = [package for package in packages if package["name"] == "uv"]
    wanted = {each["hash"] for each in [*uv["wheels"], uv["sdist"]]}
    text = (ROOT / "release" / "uv.txt").read_text()
    assert f"uv=={uv['version']} " in text
    assert set(re.findall(r"--hash=(\S+)", text)) == wanted


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_have_explicit_permissions(path: Path) -> None:
    text = path.read_text()
    uses = re.findall(r"uses: (.*)$", text, re.MULTILINE)
    assert uses
    assert [line for line in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_the_manifest_of_krew_installs_the_plugin_from_the_release() -> None:
    content = KREW.archive()
    assert content == KREW.archive()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        plugin = tar.getmember("kubectl-pagemill")
        assert plugin.mode & 0o111
        extracted = tar.extractfile(plugin)
        assert extracted is not None
        assert extracted.read() == (ROOT / "cli" / "kubectl-pagemill").read_bytes()
    (platform,) = yaml.safe_load(KREW.manifest("1.2.3", "owner/name", content))["spec"]["platforms"]
    assert platform["sha256"] == hashlib.sha256(content).hexdigest()
    assert platform["uri"] == f"https://github.com/owner/name/releases/download/v1.2.3/{KREW.ARCHIVE}"
    assert platform["bin"] == "kubectl-pagemill"
