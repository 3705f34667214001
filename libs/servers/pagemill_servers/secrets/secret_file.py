"""A file of secrets, one per line, that may be replaced at any time, as kubelets replace mounted Secrets.

Its content is read and compared at most twice a second; modification times are not used. While the file cannot be read,
or its new content has a wrong line, the previous lines stay in use. The caller interprets the lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
"""A revoked key is refused within a second."""
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_FAULTS_LOGGED = 10


class SecretFile:
    """The stripped lines of a file, without empty lines and comments (`#`)."""

    def __init__(
        self,
        path: Path,
        *,
        fault_of: Callable[[str], str | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        quiet: bool = False,
    ) -> None:
        """Read the file. Raises `OSError` when it cannot be read.

        `fault_of`: returns what is wrong with a line, or None. It must not quote the line, which may be a mistyped
        secret. In the first read, wrong lines are left out; later, a file with a wrong line is not used at all.
        `quiet`: do not log, because another reader of the same file does.
        """
        self._path = path
        self._fault_of = fault_of
        self._clock = clock
        self._quiet = quiet
        self._looked_at = clock()
        self._content = _read(path)
        self._lines, self.faults = self._parse(self._content)
        """Numbers of wrong lines, each with its fault."""
        self.problem = _first(self.faults)
        """Why the current file is not used, or not all of it; empty when it is."""
        self._log_ignored()

    def lines(self) -> tuple[str, ...]:
        """Return the lines in use: the same tuple as before while they have not changed."""
        now = self._clock()
        if now - self._looked_at >= CHECK_INTERVAL_S:
            self._looked_at = now
            self._look()
        return self._lines

    def _look(self) -> None:
        try:
            content = _read(self._path)
        except OSError as error:
            self._keep(f"it cannot be read: {error.strerror}")
            return
        if content == self._content:
            self.problem = _first(self.faults)
            return
        lines, self.faults = self._parse(content)
        self._content, self.problem = content, ""
        if self.faults:
            self._keep(_first(self.faults))
            return
        self._lines = lines
        self._log(logging.INFO, "%s has changed. Lines in use now: %d", self._path, len(lines))

    def _keep(self, problem: str) -> None:
        """Keep the previous lines in use, and log the problem once."""
        if problem != self.problem:
            self.problem = problem
            message = "%s is not used: %s. Previous lines that stay in use: %d"
            self._log(logging.ERROR, message, self._path, problem.rstrip("."), len(self._lines))

    def _parse(self, content: bytes) -> tuple[tuple[str, ...], tuple[tuple[int, str], ...]]:
        """Return the usable lines, and (number from 1, fault) of the others."""
        faults: list[tuple[int, str]] = []
        lines: list[str] = []
        if len(content) > MAX_FILE_BYTES:
            faults.append((1, f"begins a file of more than {MAX_FILE_BYTES >> 20} MiB. Remove lines"))
            content = b""
        for number, line in enumerate(content.decode("utf-8-sig", "replace").splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            fault = self._fault_of(line)
            if fault is None:
                lines.append(line)
            else:
                faults.append((number, fault))
        return tuple(lines), tuple(faults)

    def _log_ignored(self) -> None:
        for number, fault in self.faults[:MAX_FAULTS_LOGGED]:
            self._log(logging.WARNING, "%s: line %d is ignored: it %s", self._path, number, fault)
        if len(self.faults) > MAX_FAULTS_LOGGED:
            self._log(
                logging.WARNING, "%s: %d more lines are ignored", self._path, len(self.faults) - MAX_FAULTS_LOGGED
            )

    def _log(self, level: int, message: str, *arguments: object) -> None:
        if not self._quiet:
            logger.log(level, message, *arguments)


def _first(faults: tuple[tuple[int, str], ...]) -> str:
    return f"line {faults[0][0]} {faults[0][1]}" if faults else ""


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)
