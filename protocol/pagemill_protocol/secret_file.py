"""A file of secrets, one a line, that somebody else may replace at any time, as kubelets do with mounted Secrets.

Looked at at most once a second, and read again when it is another file or changed. A file that cannot be read any more
leaves what was known: secrets must not vanish for a moment during a swap. What the lines mean is the caller's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
MAX_FILE_BYTES = 4 * 1024 * 1024
_Signature = tuple[int, int, int, int]


class SecretFile:
    """The stripped lines that are neither empty nor comments (`#`)."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `OSError` when the file cannot be read now."""
        self._path = path
        self._clock = clock
        self._looked_at = clock()
        self._signature = _signature(path)
        self._lines = _read(path)
        self._faulty = False

    def lines(self) -> tuple[str, ...]:
        now = self._clock()
        if now - self._looked_at >= CHECK_INTERVAL_S:
            self._looked_at = now
            self._look()
        return self._lines

    def _look(self) -> None:
        try:
            signature = _signature(self._path)
            if signature != self._signature:
                self._lines = _read(self._path)
                self._signature = signature
        except OSError as error:
            if not self._faulty:
                logger.warning("%s cannot be read (%s); what it held before still counts", self._path, error.strerror)
            self._faulty = True
            return
        self._faulty = False


def _signature(path: Path) -> _Signature:
    """Of the file behind all links: swapping the folder behind a link changes it as well."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> tuple[str, ...]:
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES)
    lines = (line.strip() for line in raw.decode("utf-8", "replace").splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))
