"""The settings that all components read from the environment: the folder for files that live as long as a process.

The settings modules of the components read everything else.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


class SettingsError(ValueError):
    """The settings cannot be used; the message names the field, its value and the remedy."""


def full_disk_message(error: OSError) -> str | None:
    """Return the remedy for a full disk or a missing temporary folder, or None for another error."""
    has_no_folder = error.errno == errno.ENOENT and "temporary directory" in str(error.strerror)  # `tempfile`'s
    if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not has_no_folder:
        return None
    where = error.filename or f"the temporary folder {os.environ.get('TMPDIR') or '/tmp'}"
    return f"Cannot write to {where}: {error.strerror}. Free space there, or set TMPDIR to a folder on another disk."


def runtime_folder() -> Path:
    """Return `$XDG_RUNTIME_DIR`, which only this user can read and a reboot empties, or else the temporary folder."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    usable = folder.is_absolute() and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    return folder if usable else Path(tempfile.gettempdir())
