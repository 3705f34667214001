"""What one run of the loader is started with, and the variables that tune the hub's library.

`HF_ENDPOINT`, `HF_TOKEN`, `AWS_*`, `GOOGLE_*`, proxies and certificates are variables of the libraries that fetch; the
loader's pod carries them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pagemill_engine.server.failure import KUBERNETES_LOG

_LIBRARY = {
    # Plain HTTP can go on where it stopped, in little memory; the library's other transport cannot.
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DOWNLOAD_TIMEOUT": "30",
}


class LoaderSettings(NamedTuple):
    source: str
    """`SCHEME://...`, as `spec.model.source` names it."""
    target: Path
    """The folder that will hold the model; it appears when everything is there."""
    termination_log: Path = KUBERNETES_LOG
    """Written where it exists."""
    kernels: Path | None = None
    """A folder for compiled kernels, made where engines will find it."""
    num_downloads: int = 4
    """Files at once."""
    size_limit_bytes: int | None = None
    """Of all models beside the target; `None`: what the volume has."""
    evicts: bool = False
    """Models that are not used make room for this one."""


def tune_library() -> None:
    """Before the library is imported. What the pod's environment says wins."""
    for name, value in _LIBRARY.items():
        os.environ.setdefault(name, value)
