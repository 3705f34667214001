"""Without an NVIDIA device Triton's kernels run in its interpreter: chosen before anything imports Triton."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
