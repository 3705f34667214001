"""Explains why torch finds no CUDA device: no driver, a driver older than torch's CUDA, or no visible device.

torch itself reports only that there is none. This reads the driver's version and starts no CUDA.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import NamedTuple

LIBRARY = "libcuda.so.1"
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
"""File with the driver's release, visible in containers too."""
_FIRST_RELEASES = {12: "525", 13: "580"}
"""First release of NVIDIA's driver by CUDA's major version.

Within one major version, torch's minor version may be newer than the driver's.
"""


class Driver(NamedTuple):
    cuda: tuple[int, int]
    """The newest CUDA version that it supports."""
    release: str | None
    """The driver's own version, such as 535.104.05; None if it cannot be read."""

    def __str__(self) -> str:
        return f"the NVIDIA driver {self.release}" if self.release else "the NVIDIA driver"


def find_driver(kernel_module: Path = KERNEL_MODULE) -> Driver | None:
    """Return the driver whose library this process can load, or None."""
    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL(LIBRARY).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    if status != 0 or version.value == 0:
        return None
    return Driver((version.value // 1000, version.value % 1000 // 10), _release(kernel_module))


def device_problem() -> str:
    """Return the problem and its remedy, as the end of a sentence. Call this only if torch finds no device."""
    import torch

    return explain(find_driver(), torch.__version__, torch.version.cuda)


def explain(driver: Driver | None, torch_version: str, torch_cuda: str | None) -> str:
    """Return the problem and its remedy. `torch_cuda`: the CUDA version that torch was built for."""
    if torch_cuda is None:
        return f"torch {torch_version} is built without CUDA; install a build of torch with CUDA"
    if driver is None:
        return (
            f"no CUDA device is visible, because no NVIDIA driver is ({LIBRARY} cannot be loaded); install the driver, "
            "or mount it into the container and name the folder of its libraries in LD_LIBRARY_PATH"
        )
    major, minor = driver.cuda
    needed = int(torch_cuda.partition(".")[0])
    if major < needed:
        release = _FIRST_RELEASES.get(needed)
        newer = f"release {release} or later" if release else f"one for CUDA {needed}"
        return (
            f"{driver} is too old: it supports CUDA {major}.{minor}, and torch {torch_version} is built for CUDA "
            f"{torch_cuda}; update the driver to {newer}, or use a torch that is built for CUDA {major}"
        )
    return (
        f"no CUDA device is visible, though {driver} is there (CUDA {major}.{minor}); see that the "
        "process is given one (`nvidia-smi` lists them) and that CUDA_VISIBLE_DEVICES does not hide it"
    )


def _release(kernel_module: Path) -> str | None:
    try:
        match = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)", kernel_module.read_text())
    except OSError:
        return None
    return match[1] if match else None
