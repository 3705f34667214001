"""Packages of others, which a test installs as an installer does: one module, and metadata with entry points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def write_package(site: Path, module: str, code: str, group: str, *entries: str) -> Path:
    """Write a package with entry points (`name = module:object`) of a group to `site`; return the file that lists
    them."""
    information = site / f"{module}-1.0.dist-info"
    information.mkdir(parents=True)
    (site / f"{module}.py").write_text(code)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    listed = information / "entry_points.txt"
    listed.write_text("\n".join([f"[{group}]", *entries, ""]))
    return listed


def install_package(
    site: Path, monkeypatch: pytest.MonkeyPatch, module: str, code: str, group: str, *entries: str
) -> Path:
    """Write a package and put it on the path of this process until the test's end, when its module is forgotten."""
    listed = write_package(site, module, code, group, *entries)
    monkeypatch.syspath_prepend(str(site))
    # Set first, so that the module which is imported from here is removed afterwards.
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, module)
    return listed
