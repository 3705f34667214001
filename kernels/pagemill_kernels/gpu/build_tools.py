"""What Triton needs beside a device: it compiles a launcher in C for each kernel, against Python's headers.

Found out before the first kernel, since Triton's own error comes late and names neither. Starts no compiler.
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from pagemill_kernels.gpu.settings import chosen_compiler


def why_not_built() -> str | None:
    """What is missing and what to do, as the end of a sentence; `None`: nothing."""
    return explain(chosen_compiler(), Path(sysconfig.get_path("include")))


def explain(chosen: str | None, headers: Path) -> str | None:
    """`chosen`: the compiler that the environment names. `headers`: the folder of Python's."""
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
