"""Names of the files in the folder that both processes of an engine share.

Imports nothing slow: the parent starts the engine process before everything else.
"""

from __future__ import annotations

from pathlib import Path

SETTINGS_FILE = "settings.json"
CONFIGURED = b"."
"""Written to the process's pipe when the settings file is complete."""
FATAL_FILE = "fatal"
TO_ENGINE = "in"
FROM_ENGINE = "out"
MAX_QUEUED = 32
"""Maximum number of messages from the engine process that wait at each of the two sockets. Then the engine process
waits, so that outputs are not computed faster than they are delivered.
"""


def address(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}"
