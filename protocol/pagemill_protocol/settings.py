"""What all components read from the environment: the folder for files that live as long as a process.

Everything else that comes from the environment is read by the settings modules of the components.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def runtime_folder() -> Path:
    """`$XDG_RUNTIME_DIR`, which only this user can read and which a reboot empties, or the temporary folder."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    usable = folder.is_absolute() and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    return folder if usable else Path(tempfile.gettempdir())
