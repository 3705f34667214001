"""The device of the Triton tests: an NVIDIA device, or Triton's interpreter (see `tests/conftest.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
from quick_interpreter import speed_up_interpreter

from pagemill_kernels.gpu import launch

HAS_GPU = not triton.knobs.runtime.interpret
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NARROW_TYPES = [torch.float16, torch.bfloat16] if HAS_GPU else [torch.float16]
"""The 16-bit types in which kernels with matmuls are tested; the interpreter multiplies bfloat16 by its bits."""
NO_FP8 = pytest.mark.skipif(HAS_GPU and launch.fp8_problem() is not None, reason="this device has no fp8")
CODE_TYPES = [torch.int8, pytest.param(torch.float8_e4m3fn, marks=NO_FP8)]
"""The types in which 8-bit weights are stored and multiplied."""
TOLERANCES = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-4},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return standard normal numbers, which are equal on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCES[expected.dtype])


def sparse(path: Path, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in a sparse file of any size, of which only touched parts use memory. Only for the interpreter."""
    with path.open("wb") as file:
        file.truncate(numel * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=numel * dtype.itemsize, dtype=torch.uint8).view(dtype)


if not HAS_GPU:
    speed_up_interpreter()
