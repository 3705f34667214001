"""What Triton builds kernels with, and a folder of built kernels, so that the next process compiles nothing.

To compile each kernel's launcher, Triton needs a C compiler and Python's headers. They are checked before the first
kernel, since Triton's own error comes late and names neither; no compiler is started. The folder's files are loaded as
code: only users who may run code in the engine may be able to write to it.
"""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
from pathlib import Path

from pagemill_kernels.settings import chosen_compiler


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


def use_kernel_cache(folder: Path) -> OSError | None:
    """Load and store compiled kernels in the folder. Returns the error if that is impossible; then nothing changes.

    Triton names a kernel by its source, its types, its device and the compiler, and moves complete files into place:
    any number of processes may share the folder.
    """
    import triton

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return error
    triton.knobs.cache.dir = str(folder)
    return None
