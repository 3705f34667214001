"""What lies in the folder that both processes of an engine share. Imports nothing that the parent would wait for: the
engine process is to start first of all."""

from __future__ import annotations

from pathlib import Path

SETTINGS_FILE = "settings.json"
CONFIGURED = b"."
"""Through the parent's pipe: the settings are there."""
FATAL_FILE = "fatal"
TO_ENGINE = "in"
FROM_ENGINE = "out"


def address(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}"
