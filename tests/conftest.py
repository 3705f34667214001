"""Without an NVIDIA device Triton's kernels run in its interpreter: chosen before anything imports Triton.

Property tests draw a sample of their examples unless `--hypothesis-profile=full` asks for all.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("sample", settings(), max_examples=30)
settings.register_profile("full", settings(), max_examples=100)
settings.register_profile("thorough", settings(), max_examples=5000, deadline=None)
settings.load_profile("sample")
