"""Makes the repository's packages importable where only torch, Triton, numpy and safetensors are installed.

Import this before Pagemill's packages and torch: missing packages are then reported in one line.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = ("kernels", "libs/protocol", "libs/models", "libs/servers", "libs/api", "execution", "engine")
STATE = ROOT / ".pagemill" / "bench-gpu"
"""Where everything is written that no option places."""
OLDEST_PYTHON = (3, 11)
NEEDED = {"torch": (2, 11), "triton": (3, 6), "numpy": (1, 26), "safetensors": (0, 4)}
"""The oldest versions that the command was made for. Older ones may work: they are reported, not refused."""


def check_packages() -> None:
    """Raise `SystemExit` with a message if the command cannot run."""
    if sys.version_info < OLDEST_PYTHON:
        raise SystemExit(f"bench/gpu: {sys.executable} is Python {sys.version.split()[0]}; 3.11 or newer is needed")
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise SystemExit(f"bench/gpu: {sys.executable} has no {', '.join(absent)}; name another: make PYTHON=...")
    for name, oldest in NEEDED.items():
        version = _version(name)
        if version is not None and version < oldest:
            reported = (
                f"{name} is {'.'.join(map(str, version))}, this was made for {'.'.join(map(str, oldest))} or newer"
            )
            print(f"bench/gpu: {reported}", file=sys.stderr)


def _version(name: str) -> tuple[int, ...] | None:
    """Return the major and minor version, or None if there is no distribution of that name, as in nightly builds."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version(name))
    except metadata.PackageNotFoundError:
        return None
    return None if found is None else (int(found[1]), int(found[2]))


check_packages()
sys.path[1:1] = [str(ROOT / folder) for folder in FOLDERS]
# The client and the workers that the CPU benches use as well.
sys.path.append(str(ROOT / "bench"))
sys.path.append(str(HERE / "stand_ins"))
