"""Makes our source folders importable as they lie here, where only torch, Triton, numpy and safetensors are installed.

Imported before anything of ours.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = ("kernels", "protocol", "engine")

sys.path[1:1] = [str(ROOT / folder) for folder in FOLDERS]
sys.path.append(str(HERE / "stand_ins"))
