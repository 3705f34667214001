"""The private folder of one running backend: settings, tokens, logs and decisions; removed when the backend stops.

A killed backend cannot remove its folder; the next backend does. A running one holds a lock on its `owner.json`
(flock(2)), which the kernel releases however the backend ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict

from pagemill_operator.backends.base import BackendError

PREFIX = "pagemill-up-"
OWNER_FILE = "owner.json"
RECORDS_FILE = "scaling.jsonl"
"""The autoscaler's latest decisions, as `autoscaler.decision` encodes them."""
TARGETS_FILE = "targets.json"
"""The metrics addresses of gateway and engines, in the format of Prometheus's file discovery."""
MAX_TEMPORARY_PATH = 70
"""Bytes. A Unix socket's path has at most 107, and engines add a folder of their own."""


class ScrapeTarget(TypedDict):
    """Addresses that serve metrics, and the labels of their series."""

    targets: list[str]
    labels: dict[str, str]


class StateDir:
    """A folder that only this user can read (0700; files 0600)."""

    def __init__(self, parent: Path, logs_folder: Path | None = None) -> None:
        """Create the folder. Raise `BackendError` if that is not possible. `logs_folder` keeps the logs at the end."""
        self._logs_folder = logs_folder
        remove_abandoned(parent, logs_folder)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._lock = self._take_lock()
        except OSError as error:
            message = f"cannot make a private folder in {parent}: {error.strerror}; set XDG_RUNTIME_DIR to another one"
            raise BackendError(message) from None
        temporary = self.path / "tmp"
        temporary.mkdir(mode=0o700)
        self.temporary = temporary if len(os.fsencode(temporary)) <= MAX_TEMPORARY_PATH else None
        """Temporary folder of the engines; None if its path is too long for sockets in it."""

    def write_json(self, name: str, content: Any) -> Path:
        """Write a file that only this user can read; return its path."""
        return self._write(name, json.dumps(content).encode())

    def replace_json(self, name: str, content: Any) -> None:
        """Write a file that only this user can read and that processes follow."""
        self._replace(name, json.dumps(content).encode())

    def write_token(self, name: str, token: str) -> Path:
        """Write a file with one token; return its path."""
        return self._write(name, f"{token}\n".encode())

    def write_records(self, lines: Iterable[bytes]) -> None:
        self._replace(RECORDS_FILE, b"".join(line + b"\n" for line in lines))

    def write_targets(self, targets: list[ScrapeTarget]) -> None:
        self._replace(TARGETS_FILE, json.dumps(targets).encode())

    def log_path(self, name: str) -> Path:
        return self.path / f"{name}.log"

    def remove(self) -> None:
        _keep_logs(self.path, self._logs_folder)
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def _write(self, name: str, content: bytes) -> Path:
        path = self.path / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return path

    def _replace(self, name: str, content: bytes) -> None:
        """Replace a file atomically: concurrent readers see the old content or the new one."""
        self._write(f"{name}.new", content).rename(self.path / name)

    def _take_lock(self) -> BinaryIO:
        """Return `owner.json`, open and locked. It gets its name only once it is locked."""
        path = self.write_json(f"{OWNER_FILE}.new", {"pid": os.getpid()})
        file = path.open("rb")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.rename(self.path / OWNER_FILE)
        return file


def _keep_logs(folder: Path, logs_folder: Path | None) -> None:
    """Keep the logs of a backend that has ended, in place of those of the one before."""
    if logs_folder is None:
        return
    with contextlib.suppress(OSError):  # an unwritable home must not keep the backend from stopping
        logs_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in logs_folder.glob("*.log*"):
            old.unlink()
        for log in folder.glob("*.log*"):
            shutil.copy(log, logs_folder / log.name)


def remove_abandoned(parent: Path, logs_folder: Path | None = None) -> None:
    """Remove this user's folders whose backend no longer runs; the last one's logs are kept in `logs_folder`."""
    for folder in parent.glob(f"{PREFIX}*"):
        if _own(folder) and _abandoned(folder):
            _keep_logs(folder, logs_folder)
            shutil.rmtree(folder, ignore_errors=True)


class Running(NamedTuple):
    """A running backend of this user, as other processes see it."""

    pid: int
    folder: Path


def running(parent: Path) -> list[Running]:
    """Return the backends whose folders are below `parent`, in no order."""
    found = []
    for folder in parent.glob(f"{PREFIX}*"):
        if _own(folder) and not _abandoned(folder):
            # A backend may end, or may not have started completely, in the meantime.
            with contextlib.suppress(OSError, ValueError, KeyError):
                found.append(Running(int(json.loads((folder / OWNER_FILE).read_bytes())["pid"]), folder))
    return found


def _own(folder: Path) -> bool:
    try:
        return not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    except OSError:
        return False  # another process has just removed it


def _abandoned(folder: Path) -> bool:
    try:
        with (folder / OWNER_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False  # its backend runs, or is just starting
