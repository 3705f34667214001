"""The environment variable of GPU kernels: the C compiler for Triton."""

from __future__ import annotations

import os


def chosen_compiler() -> str | None:
    """Return `CC`, which Triton prefers; None: Triton looks for gcc and clang."""
    return os.environ.get("CC") or None
