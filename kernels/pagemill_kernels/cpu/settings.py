"""The environment variable of the native kernels: the configured level."""

from __future__ import annotations

import os

LEVEL_SETTING = "PAGEMILL_CPU_LEVEL"
NONE = "none"
"""Value that disables native kernels: torch computes."""


def chosen_level() -> str:
    """Return the configured level; "" chooses the highest that fits the processor."""
    return os.environ.get(LEVEL_SETTING, "")
