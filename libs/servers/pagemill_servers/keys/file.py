"""The file of API keys: servers open it and follow its changes, commands check it before they start a server.

Each line is an entry (`entries`), as in the settings and in Secrets. `secret_file` follows changes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagemill_servers.keys.entries import fault_of
from pagemill_servers.secrets.secret_file import SecretFile


class KeysFileError(ValueError):
    """The file cannot be used; the message names file, line and remedy, and shows no secret."""


def open_keys_file(path: Path, *, fault_of: Callable[[str], str | None] = fault_of, quiet: bool = False) -> SecretFile:
    """Open the file for a server. Raises `KeysFileError` when it has lines and none is valid.

    One wrong line does not prevent a start, for example after the server's node failed.
    """
    file = _open(path, fault_of, quiet=quiet)
    if file.faults and not file.lines():
        number, fault = file.faults[0]
        raise KeysFileError(f"no line of {path} is a key's entry; line {number} {fault}")
    return file


def check_keys_file(path: Path, *, fault_of: Callable[[str], str | None] = fault_of) -> None:
    """Check the file before a command starts a server. Raises `KeysFileError` for the first wrong line, or for no
    line."""
    file = _open(path, fault_of, quiet=True)
    if file.faults:
        number, fault = file.faults[0]
        raise KeysFileError(f"line {number} of {path} {fault}")
    if not file.lines():
        raise KeysFileError(f"{path} holds no key. Write one line for each key: its SHA-256 in hex, then its limits.")


def _open(path: Path, fault_of: Callable[[str], str | None], *, quiet: bool) -> SecretFile:
    try:
        return SecretFile(path, fault_of=fault_of, quiet=quiet)
    except OSError as error:
        raise KeysFileError(f"cannot read {path}: {error.strerror}. Name a file that can be read.") from error
