"""Finds Helm's programs: those that `e2e/cluster build` compiled, or the user's on PATH."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

BINARIES = Path(__file__).resolve().parents[1] / "cluster" / "binaries.py"


def built_folder() -> Path:
    """Return the folder of `e2e/cluster build`'s programs of the pinned versions."""
    spec = importlib.util.spec_from_file_location("e2e_cluster_binaries", BINARIES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module by name
    spec.loader.exec_module(module)
    folder: Path = module.bin_dir()
    return folder


def find(name: str) -> str:
    """Return the path of `helm`, `helm3` or `helm-unittest`."""
    built = built_folder() / name
    found = str(built) if built.exists() else shutil.which(name)
    assert found is not None, f"{name} is neither built (python e2e/cluster build) nor on PATH"
    return found
