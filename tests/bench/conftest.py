"""Adds the folder of the benchmarks to the path, because the scripts import each other from it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
