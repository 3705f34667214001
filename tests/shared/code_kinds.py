"""Kinds of codes that native linear layers take, and what holds for every layer whatever it multiplies."""

from __future__ import annotations

import torch

from pagemill_kernels.cpu import launch
from pagemill_kernels.cpu.torch_ops import TorchLinear

KINDS = {
    "codes4": (4, 32, True),
    "codes8": (8, 32, False),
    "codes8 offsets": (8, 32, True),
    "codes8 groups of 16": (8, 16, False),
    "codes8 groups of 16 offsets": (8, 16, True),
}
"""Bits, group size, offsets."""


def check_threads_change_nothing(linear: TorchLinear) -> None:
    for rows in (1, 4, 70, 300):
        x = torch.randn(rows, linear.in_features)
        expected = linear(x)
        launch.set_num_threads(2)
        try:
            assert torch.equal(linear(x), expected)
        finally:
            launch.set_num_threads(1)
