"""Where tests of the Triton path run: on the NVIDIA device, or in Triton's interpreter: see `tests/conftest.py`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder

from pagemill_kernels.gpu import launch

HAS_GPU = not triton.knobs.runtime.interpret
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NARROW_TYPES = [torch.float16, torch.bfloat16] if HAS_GPU else [torch.float16]
"""What kernels with products are tested in: the interpreter multiplies bfloat16 by its bits."""
NO_FP8 = pytest.mark.skipif(HAS_GPU and launch.fp8_problem() is not None, reason="this device has no fp8")
CODE_TYPES = [torch.int8, pytest.param(torch.float8_e4m3fn, marks=NO_FP8)]
"""What 8-bit codes are kept and multiplied in."""
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


def sparse(path: Path, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in a file with holes, of any size: what is never touched lies nowhere. Only for the interpreter."""
    with path.open("wb") as file:
        file.truncate(numel * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=numel * dtype.itemsize, dtype=torch.uint8).view(dtype)


call_and_patch = InterpretedFunction.__call__
patched_modules: set[str] = set()


def _called_by_a_kernel(function: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """The interpreter patches its language whenever one function calls another: needed once for each module, and for
    ours the launch does it."""
    module = function.fn.__module__
    if module.startswith("pagemill_kernels") or module in patched_modules:
        return function.rewrite()(*args, **kwargs)
    patched_modules.add(module)
    return call_and_patch(function, *args, **kwargs)


InterpretedFunction.__call__ = _called_by_a_kernel
# Each sum of integers would be computed three times, as only debug builds of a kernel do.
interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
