"""`rope.Rotations` as tensors of a device, in the type that a model computes in."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_execution.decoders.rope import Table
from pagemill_kernels.torch_arrays import to_torch


class DeviceRotations:
    def __init__(self, tables: list[Table], dtype: torch.dtype, device: torch.device) -> None:
        self.tables = [(to_torch(cos).to(device, dtype), to_torch(sin).to(device, dtype)) for cos, sin in tables]

    def at(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return cos and sin of the positions for `ForwardContext.rotations`."""
        return [(cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)) for cos, sin in self.tables]
