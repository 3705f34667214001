"""What GPU kernels read from the environment: the C compiler that Triton takes."""

from __future__ import annotations

import os


def chosen_compiler() -> str | None:
    """`CC`, which Triton asks first; `None`: it looks for gcc and clang itself."""
    return os.environ.get("CC") or None
