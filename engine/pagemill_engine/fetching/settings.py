"""Settings of one run of the loader, and environment variables that tune the hub's library.

`HF_ENDPOINT`, `HF_TOKEN`, `AWS_*`, `GOOGLE_*`, proxies and certificates are read by the libraries that fetch; the
loader's pod sets them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from pagemill_engine.failure import KUBERNETES_LOG

_LIBRARY = {
    # Plain HTTP can resume a download, in little memory; the library's other transport cannot.
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DOWNLOAD_TIMEOUT": "30",
}

REPORTED = "PAGEMILL_REPORTED_FAILURE"
"""Names a file that outlives the container, with the reason of its last end; without it nothing is tried again."""
TRYING_SINCE = "PAGEMILL_TRYING_SINCE"


class LoaderSettings(NamedTuple):
    source: str
    """`SCHEME://...`, as in `spec.model.source`."""
    target: Path
    """The folder for the model; it appears when all files are complete."""
    termination_log: Path = KUBERNETES_LOG
    """Written if it exists."""
    kernels: Path | None = None
    """A folder for compiled kernels, created for the engines."""
    num_downloads: int = 4
    """Number of files that are downloaded at a time."""
    size_limit_bytes: int | None = None
    """Limit of the total size of the models in the target's parent folder; None: the volume's size."""
    evicts: bool = False
    """Whether unused models are removed to free space for this one."""


def reported_failure() -> Path | None:
    """Return the file with the reason that the container last ended for, or None outside of a pod."""
    name = os.environ.get(REPORTED)
    return Path(name) if name else None


def trying_since_s() -> float:
    """Return the monotonic time at which the container's first try failed, which later programs in it inherit."""
    return float(os.environ.setdefault(TRYING_SINCE, str(time.monotonic())))


def tune_library() -> None:
    """Set the library's variables unless the environment has them. Call this before the library is imported."""
    for name, value in _LIBRARY.items():
        os.environ.setdefault(name, value)
