"""Reads settings files, and the folder for files that live as long as a process.

Which settings there are is in the settings modules of the components.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


class SettingsError(ValueError):
    """The settings cannot be used; the message names the field, its value and the remedy."""


class UnreadableSettingsError(SettingsError):
    """The settings file cannot be read."""


def read_settings(path: Path, form: type[T]) -> T:
    """Return the content of a JSON settings file. Raises `SettingsError`, which names the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except OSError as error:
        message = f"Cannot read the settings file {path}: {error.strerror}. Give a readable JSON file."
        raise UnreadableSettingsError(message) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # Also `ValidationError`, whose text names the field.
        raise SettingsError(f"The settings file {path} is wrong: {error}. Correct it.") from error


def full_disk_message(error: OSError) -> str | None:
    """Return the remedy for a full disk or a missing temporary folder, or None for another error."""
    has_no_folder = error.errno == errno.ENOENT and "temporary directory" in str(error.strerror)  # `tempfile`'s
    if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not has_no_folder:
        return None
    where = error.filename or f"the temporary folder {os.environ.get('TMPDIR') or '/tmp'}"
    return f"Cannot write to {where}: {error.strerror}. Free space there, or set TMPDIR to a folder on another disk."


def logs_folder() -> Path:
    """Return the folder in which the logs of the last `pagemill up` stay."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "pagemill" / "logs"


def runtime_folder() -> Path:
    """Return `$XDG_RUNTIME_DIR`, which only this user can read and a reboot empties, or else the temporary folder."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    usable = folder.is_absolute() and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    return folder if usable else Path(tempfile.gettempdir())
