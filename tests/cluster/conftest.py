"""Imports the modules of `e2e/cluster` and `e2e/up_kubernetes`, programs and not packages, by their bare names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

E2E = Path(__file__).resolve().parents[2] / "e2e"
FOLDERS = [E2E / "cluster", E2E / "up_kubernetes"]


@pytest.fixture
def module() -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports a module, `module("storage")`; all of them are removed after the test."""
    names = {path.stem for folder in FOLDERS for path in folder.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path[:0] = map(str, FOLDERS)
    try:
        yield importlib.import_module
    finally:
        for folder in FOLDERS:
            sys.path.remove(str(folder))
        for name in names & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(before)
