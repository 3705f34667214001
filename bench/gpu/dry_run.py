"""A run that computes nothing: Triton's interpreter starts no program of a kernel, so that other code runs in seconds.

Results are then whatever their memory held; `Device.is_dry_run` says that nothing compares or times them.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import interpreter


def compute_nothing() -> None:
    """Let launches return at once. New tensors hold zeros, which are valid tokens and places."""
    executor: Any = interpreter.GridExecutor
    executor.__call__ = lambda self, *arguments, **named: None
    for name in ("empty", "empty_like"):
        setattr(torch, name, getattr(torch, name.replace("empty", "zeros")))
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign]
