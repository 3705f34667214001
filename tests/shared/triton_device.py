"""Where tests of the Triton path run: on the NVIDIA device, or in Triton's interpreter: see `tests/conftest.py`."""

from __future__ import annotations

import torch
import triton

HAS_GPU = not triton.knobs.runtime.interpret
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NARROW_TYPES = [torch.float16, torch.bfloat16] if HAS_GPU else [torch.float16]
"""What kernels with products are tested in: the interpreter multiplies bfloat16 by its bits."""
TOLERANCES = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-4},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, the same ones on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCES[expected.dtype])
