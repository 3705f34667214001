"""What native kernels read from the environment: the level that is wanted of them."""

from __future__ import annotations

import os

LEVEL_SETTING = "PAGEMILL_CPU_LEVEL"
NONE = "none"
"""No native kernels: torch computes."""


def chosen_level() -> str:
    """Empty: the highest that fits the processor."""
    return os.environ.get(LEVEL_SETTING, "")
