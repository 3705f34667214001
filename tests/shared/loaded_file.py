"""Loads a Python file that belongs to no package as a module, for tests of scripts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def module_of(path: Path, name: str) -> Any:
    """Return the module of a file. `name`: in `sys.modules`, where data classes look up their module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
