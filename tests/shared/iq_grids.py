"""Writes the grids of GGUF's IQ types from the package `gguf`: `python tests/shared/iq_grids.py`."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants

KINDS = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
FILE = Path(__file__).resolve().parents[2] / "execution" / "pagemill_execution" / "weights" / "iq_grids.json"


def grid_of(kind: str) -> np.ndarray[Any, Any]:
    """Return the type's vectors, [number, 4 or 8]."""
    found = getattr(quants, kind)
    found.init_grid()
    return np.asarray(found.grid[0, 0], dtype=np.int8)


def _packed(grid: np.ndarray[Any, Any]) -> tuple[list[int], int, str]:
    levels, numbers = np.unique(grid, return_inverse=True)
    digits = "".join(map(str, numbers.ravel().tolist()))
    return levels.tolist(), grid.shape[1], base64.b85encode(zlib.compress(digits.encode(), 9)).decode()


if __name__ == "__main__":
    FILE.write_text(json.dumps({kind: _packed(grid_of(kind)) for kind in KINDS}, indent=1) + "\n")
