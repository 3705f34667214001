"""Imports the modules of `e2e/cluster`, which is a program and not a package, by their bare names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "e2e" / "cluster"


@pytest.fixture
def module() -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports a module, `module("storage")`; all of them are removed after the test."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(FOLDER))
        for name in names & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(before)
