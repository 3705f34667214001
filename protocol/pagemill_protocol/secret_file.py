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
MAX_FAULTS_TOLD = 10
_Signature = tuple[int, int, int, int]


class SecretFile:
    """The stripped lines that are neither empty nor comments (`#`), nor found wrong by `fault_of`."""

    def __init__(
        self,
        path: Path,
        *,
        fault_of: Callable[[str], str | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lines for which `fault_of` says what is wrong are ignored with a warning.

        What it says must not show what they hold: it may be a secret in the wrong form. Raises `OSError` when the file
        cannot be read now.
        """
        self._path = path
        self._fault_of = fault_of
        self._clock = clock
        self._looked_at = clock()
        self._signature = _signature(path)
        self._lines: tuple[str, ...] = ()
        self.faults: tuple[tuple[int, str], ...] = ()
        """Numbers of wrong lines, and what is wrong with each."""
        self._read()
        self._faulty = False

    def lines(self) -> tuple[str, ...]:
        """The same tuple as before while the file did not change."""
        now = self._clock()
        if now - self._looked_at >= CHECK_INTERVAL_S:
            self._looked_at = now
            self._look()
        return self._lines

    def _look(self) -> None:
        try:
            signature = _signature(self._path)
            if signature != self._signature:
                self._read()
                self._signature = signature
        except OSError as error:
            if not self._faulty:
                logger.warning("%s cannot be read (%s); what it held before still counts", self._path, error.strerror)
            self._faulty = True
            return
        self._faulty = False

    def _read(self) -> None:
        faults: list[tuple[int, str]] = []
        lines: list[str] = []
        for number, line in _read(self._path):
            fault = self._fault_of(line)
            if fault is None:
                lines.append(line)
            else:
                faults.append((number, fault))
        self._lines, self.faults = tuple(lines), tuple(faults)
        for number, fault in faults[:MAX_FAULTS_TOLD]:
            logger.warning("%s: line %d is ignored: it %s", self._path, number, fault)
        if len(faults) > MAX_FAULTS_TOLD:
            logger.warning("%s: %d more lines are ignored", self._path, len(faults) - MAX_FAULTS_TOLD)


def _signature(path: Path) -> _Signature:
    """Of the file behind all links: swapping the folder behind a link changes it as well."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> list[tuple[int, str]]:
    """Lines with their numbers, from 1."""
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES)
    lines = ((number, line.strip()) for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), 1))
    return [(number, line) for number, line in lines if line and not line.startswith("#")]
