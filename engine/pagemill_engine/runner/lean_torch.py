"""Imports torch without CUDA's mathematical libraries where no NVIDIA driver is installed, so that they cannot be used.

torch as it is published for Linux names them as its needs, and loading them takes 240 MiB of every process and a sixth
of the import. Here empty libraries of the same names are loaded first (`runner.empty_library`), which satisfies the
linker: torch calls into the real ones from CUDA operations alone, which need the driver. With a driver, with a build of
torch that has no such needs and with a release that was not looked into, it is a plain import. Called by whoever
imports torch first. Why, and what a release has to be looked into for: docs/adr/0043-torch-without-cuda-libraries.md.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from pathlib import Path

from pagemill_engine.runner.empty_library import load_empty
from pagemill_engine.settings import can_bind_late, torch_binds_late

logger = logging.getLogger(__name__)

_DRIVER = "libcuda.so.1"
_KNOWN_RELEASES = ("2.15.",)
"""Releases of torch in which every reference to one of these libraries is a function that only CUDA operations call."""
_UNNEEDED = ("libcublasLt", "libcublas", "libcufft", "libcusparse", "libcusparseLt", "libnvrtc")


def import_torch() -> None:
    """Does nothing where it is imported already."""
    if "torch" in sys.modules:
        return
    names = _installed() if _is_known() and can_bind_late() and not _has_driver() else []
    if not names:
        importlib.import_module("torch")
        return
    try:
        load_empty(names)
    except OSError as error:
        logger.warning("CUDA's libraries take memory though there is no driver for them: %s", error)
    with torch_binds_late():
        importlib.import_module("torch")


def _is_known() -> bool:
    return importlib.metadata.version("torch").startswith(_KNOWN_RELEASES)


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def _installed() -> list[str]:
    """Those that came with torch, by the names that it knows them by."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    libraries = [f"*/lib/{name}.so.*" for name in _UNNEEDED]
    return sorted({path.name for folder in folders or () for each in libraries for path in Path(folder).glob(each)})
