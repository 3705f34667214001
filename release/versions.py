"""The one version of the project: the places that name it, whether they agree, and how to change it everywhere.

`python release/versions.py` prints it, `--set 0.2.0` writes it, `--tag v0.2.0` checks that a tag may be released. How
packages are built is the matter of `wheels.py`. `make bump` resolves uv.lock afterwards.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
"""A version that both the Python index and, as `chart_version`, Helm accept."""
PIN = re.compile(r'("pagemill(?:-\w+)?(?:\[\w+\])?)==[^"]+(")')


class VersionError(Exception):
    """Places disagree, or a version or tag cannot be used; the message names the remedy."""


def members(root: Path = ROOT) -> list[str]:
    workspace = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]
    return [str(name) for name in workspace["members"]]


def projects(root: Path = ROOT) -> list[Path]:
    return [root / "pyproject.toml", *(root / name / "pyproject.toml" for name in members(root))]


def chart_version(version: str) -> str:
    """Return `0.2.0rc1` in semantic versioning's form: `0.2.0-rc.1`."""
    return re.sub(r"(a|b|rc)(\d+)$", r"-\1.\2", version)


def written(root: Path = ROOT) -> dict[str, str]:
    """Return each place that names the version, with its value."""
    found: dict[str, str] = {}
    for path in projects(root):
        place = str(path.relative_to(root))
        project = tomllib.loads(path.read_text())["project"]
        found[place] = project["version"]
        for requirement in _requirements(project):
            if match := re.fullmatch(r"(pagemill(?:-\w+)?(?:\[\w+\])?)==(.+)", requirement):
                found[f"{place}: {match[1]}"] = match[2]
    for key in ("version", "appVersion"):
        match = re.search(rf"^{key}: (\S+)$", (root / "charts/pagemill/Chart.yaml").read_text(), re.MULTILINE)
        found[f"charts/pagemill/Chart.yaml: {key}"] = re.sub(r"-(a|b|rc)\.", r"\1", match[1]) if match else "none"
    return found


def unpinned(root: Path = ROOT) -> list[str]:
    """Return dependencies between this project's packages that do not pin the version."""
    return [
        f"{path.relative_to(root)}: {requirement}"
        for path in projects(root)[1:]
        for requirement in _requirements(tomllib.loads(path.read_text())["project"])
        if requirement.startswith("pagemill") and "==" not in requirement
    ]


def agreed(root: Path = ROOT) -> str:
    """Return the version that every place names. Raise `VersionError` if they differ."""
    found = written(root)
    if len(set(found.values())) > 1:
        listed = "\n".join(f"  {value}  {place}" for place, value in sorted(found.items()))
        raise VersionError(f"these places name different versions; run `make bump VERSION=...`:\n{listed}")
    return next(iter(found.values()))


def released(root: Path = ROOT) -> list[str]:
    """Return the versions with a heading of their own in the changelog, newest first."""
    return re.findall(r"^## \[(\d[^\]]*)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)


def set_everywhere(version: str, root: Path = ROOT, today: str | None = None) -> None:
    """Write `version` to every place, and its heading below the changelog's Unreleased. Raise `VersionError`."""
    if not VERSION.fullmatch(version):
        raise VersionError(f"VERSION `{version}` is not of the form 0.2.0 or 0.2.0rc1")
    for path in projects(root):
        text = re.sub(r'^version = "[^"]+"$', f'version = "{version}"', path.read_text(), count=1, flags=re.MULTILINE)
        path.write_text(PIN.sub(rf"\g<1>=={version}\2", text))
    chart = root / "charts/pagemill/Chart.yaml"
    chart.write_text(
        re.sub(r"^(version|appVersion): \S+$", rf"\1: {chart_version(version)}", chart.read_text(), flags=re.MULTILINE)
    )
    if version not in released(root):
        changelog = root / "CHANGELOG.md"
        day = today or datetime.now(UTC).date().isoformat()
        heading = f"## [Unreleased]\n\n## [{version}] - {day}\n"
        changelog.write_text(changelog.read_text().replace("## [Unreleased]\n", heading, 1))


def check_tag(tag: str, root: Path = ROOT) -> str:
    """Return the version that `tag` releases. Raise `VersionError` if the files are not ready for it."""
    version = agreed(root)
    if tag != f"v{version}":
        raise VersionError(f"the tag `{tag}` is not `v{version}`, which the files name; run `make bump` and tag again")
    if released(root)[:1] != [version]:
        raise VersionError(f"CHANGELOG.md has no heading `## [{version}]` below Unreleased; run `make bump`")
    return version


def notes(root: Path = ROOT) -> str:
    """Return the changelog's section of the latest release."""
    parts = re.split(r"^## \[.*$", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return parts[2].strip() if len(parts) > 2 else ""


def _requirements(project: dict[str, object]) -> Iterable[str]:
    own, extras = project.get("dependencies", []), project.get("optional-dependencies", {})
    assert isinstance(own, list)
    assert isinstance(extras, dict)
    return [*own, *(requirement for each in extras.values() for requirement in each)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print, set or check the project's version.")
    parser.add_argument("--set", metavar="VERSION", help="write it to every place")
    parser.add_argument("--tag", help="fail unless the files are ready for a release under this tag")
    parser.add_argument("--notes", action="store_true", help="print the changelog of the newest release")
    args = parser.parse_args()
    try:
        if args.set is not None:
            set_everywhere(args.set)
        print(notes() if args.notes else check_tag(args.tag) if args.tag is not None else agreed())
    except VersionError as error:
        sys.exit(f"versions: {error}")


if __name__ == "__main__":
    main()
