"""Where compiled kernels are kept: a folder that outlives the process, so that the next one compiles nothing.

What is in it is loaded as code: only those who may run code in the engine may be able to write it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path


def keep_compiled(folder: Path) -> OSError | None:
    """Look for compiled kernels there and keep new ones there; returns why that cannot be, and then changes nothing.

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
