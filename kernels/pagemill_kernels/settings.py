"""The environment variables of kernels: the level of the native kernels, and the C compiler for Triton."""

from __future__ import annotations

import os

LEVEL_SETTING = "PAGEMILL_CPU_LEVEL"
NONE = "none"
"""Value that disables native kernels: torch computes."""


def chosen_level() -> str:
    """Return the configured level; "" chooses the highest that fits the processor."""
    return os.environ.get(LEVEL_SETTING, "")


def chosen_compiler() -> str | None:
    """Return `CC`, which Triton prefers; None: Triton looks for gcc and clang."""
    return os.environ.get("CC") or None
