"""A persistent folder for compiled kernels, so that the next process compiles nothing.

Its files are loaded as code: only users who may run code in the engine may be able to write to it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path


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
