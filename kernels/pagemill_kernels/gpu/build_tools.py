"""Checks for the tools that Triton needs: a C compiler and Python's headers, to compile each kernel's launcher.

The check runs before the first kernel, since Triton's own error comes late and names neither. It starts no compiler.
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from pagemill_kernels.gpu.settings import chosen_compiler


def build_problem() -> str | None:
    """Return what is missing and what to do, as the end of a sentence; None if nothing is missing."""
    return explain(chosen_compiler(), Path(sysconfig.get_path("include")))


def explain(chosen: str | None, headers: Path) -> str | None:
    """Return the problem and its remedy, or None.

    `chosen`: the compiler that the environment names. `headers`: the folder of Python's headers.
    """
    if chosen is not None and shutil.which(chosen) is None:
        return f"the C compiler that CC names, {chosen!r}, is not there; unset CC, or name one that is"
    if chosen is None and not any(map(shutil.which, ("gcc", "clang"))):
        return (
            "Triton needs a C compiler for each kernel's launcher, and neither gcc nor clang is there; install one "
            "(Debian and Ubuntu: `apt-get install gcc libc6-dev`)"
        )
    if not (headers / "Python.h").is_file():
        return (
            f"Triton compiles against Python's headers, and {headers}/Python.h is not there; install them (Debian and "
            "Ubuntu: `apt-get install python3-dev`)"
        )
    return None
