"""Control tokens that servers without a configured one make at their start, in files that only their user can read.

The file is named after the address and the port of the control port, so that servers of one machine do not collide and
tools of the same user find a server's token by its URL. The file is removed when the server ends; a file that a killed
server left is replaced by the next server at that port. `guard` checks tokens; the server reads its own file as
any other file of tokens (`secret_file`). Standard library only: a pod's drain imports this module.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from pagemill_servers.process.settings import runtime_folder

CHECK_INTERVAL_S = 1.0
"""Interval in seconds at which files are read again: a restarted server has a new token."""
MAX_TOKEN_BYTES = 1024
MAX_SERVERS = 4096
"""Limit on the remembered tokens."""
NUM_TRIES = 3
"""Another server that ends may remove the folder between its creation and the write into it."""
LOOPBACK = ("127.0.0.1", "::1")
ANY_ADDRESS = ("0.0.0.0", "::")


class TokenFileError(Exception):
    """The file cannot be written; the message names it, the reason and the remedy."""


@contextlib.contextmanager
def generated_token_file(address: str, port: int, parent: Path | None = None) -> Iterator[Path]:
    """Keep a file with a new token for the server bound to `address` and `port` while the block runs.

    `parent`: where the folder of this user's files is made; `None`: the runtime folder. Raises `TokenFileError`.
    """
    token = secrets.token_urlsafe(32)
    try:
        path = _folder(parent) / _name(address, port)
        _write_private(path, token)
    except OSError as error:
        raise TokenFileError(
            f"no file can be made for the control token: {error}; set XDG_RUNTIME_DIR to a folder that this user can "
            "write and no other user can read, or configure a token"
        ) from error
    try:
        yield path
    finally:
        # By now another server may listen there, with a token of its own.
        if _read(path) == token:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other servers have files there
            path.parent.rmdir()


def read_generated_token(control_url: str, parent: Path | None = None) -> str:
    """Return the token that a server of this user on this machine has made; empty where there is none."""
    # A server that was killed at another address of the same port may have left its file.
    try:
        paths = sorted(_paths(control_url, _folder(parent)), key=_written_at, reverse=True)
    except FileNotFoundError:  # the system has no folder for temporary files
        return ""
    return next(filter(None, map(_read, paths)), "")


class GeneratedTokens:
    """Tokens of this user's servers on this machine by control URL, as servers start and end."""

    def __init__(self, parent: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._parent = parent
        self._clock = clock
        self._known: dict[str, _CachedToken] = {}

    def find(self, control_url: str) -> str:
        """Return the server's current or last known token; empty where there was none."""
        known, now = self._known.get(control_url), self._clock()
        if known is not None and now - known.read_at < CHECK_INTERVAL_S:
            return known.token
        if known is None and len(self._known) >= MAX_SERVERS:
            self._known.clear()
        token = read_generated_token(control_url, self._parent) or (known.token if known is not None else "")
        self._known[control_url] = _CachedToken(token, now)
        return token


class _CachedToken(NamedTuple):
    token: str
    read_at: float


def _folder(parent: Path | None) -> Path:
    return (parent or runtime_folder()) / f"pagemill-{os.getuid()}"


def _name(address: str, port: int) -> str:
    return f"control-{address}-{port}.token"


def _paths(control_url: str, folder: Path) -> Iterator[Path]:
    """Yield the token files of the servers that the URL may refer to."""
    try:
        parts = urlsplit(control_url)
        host, port = parts.hostname or "", parts.port
        addresses = [ipaddress.ip_address(each) for each in (LOOPBACK if host == "localhost" else (host,))]
    except ValueError:  # a host name usually belongs to another machine
        return
    if port is None:
        return
    names = [str(address) for address in addresses]
    if addresses[0].is_loopback:
        names += ANY_ADDRESS
    yield from (folder / _name(name, port) for name in names)


def _write_private(path: Path, token: str) -> None:
    """Write the token file and its folder. Raises `OSError`."""
    for _ in range(NUM_TRIES - 1):
        _make_private(path.parent)
        with contextlib.suppress(FileNotFoundError):
            return _write(path, token)
    _make_private(path.parent)
    _write(path, token)


def _make_private(folder: Path) -> None:
    """Make the folder. Raises `OSError` if another user owns or can enter it: in a shared folder its name can be
    guessed."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EACCES, "the folder is not private to this user", str(folder))


def _write(path: Path, token: str) -> None:
    """Write the file atomically, readable by this user only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    temporary.replace(path)


def _written_at(path: Path) -> int:
    """Return the modification time in ns; 0 where there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> str:
    """Return the token; empty where this user has no such file."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return ""
            return file.read(MAX_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
