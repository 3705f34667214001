"""Uploads a step's changes and its rows: collects them, packs them once, copies them once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.request_rows.layout import RowWrites, StepRows, aligned

PIECE = 1024
"""Most elements that one program writes."""

Values = Sequence[int] | NDArray[np.int32]


class Staging:
    """Buffers of one step."""

    def __init__(self) -> None:
        self._to: list[int] = []
        self._values: list[Values] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not self._to

    def put(self, to: int, values: Values) -> None:
        """Stage `values` for the row state's elements from `to` on."""
        for start in range(0, len(values), PIECE):
            self._to.append(to + start)
            self._values.append(values[start : start + PIECE])

    def upload(
        self, rows: NDArray[np.int32], query_start_loc: NDArray[np.int32], sample_start_loc: NDArray[np.int32],
        device: torch.device,
    ) -> tuple[RowWrites, StepRows]:  # fmt: skip
        """Upload everything in one copy."""
        counts = np.fromiter(map(len, self._values), np.int64, len(self._values))
        pieces = np.array([self._to, np.cumsum(counts) - counts, counts], dtype=np.int64)
        values = np.concatenate(self._values, dtype=np.int32) if self._values else np.zeros(0, dtype=np.int32)
        parts = [pieces.reshape(-1).view(np.int32), values, rows, query_start_loc, sample_start_loc]
        on_device = upload_together(parts, device)
        writes = RowWrites(on_device[0].view(torch.int64).view(3, -1), on_device[1])
        return writes, StepRows(*on_device[2:])


def upload_together(arrays: list[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Upload arrays in one copy; each array begins at a multiple of 16 bytes."""
    starts = np.cumsum([0, *(aligned(len(array)) for array in arrays)]).tolist()
    packed = np.empty(starts[-1], dtype=np.int32)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + len(array)] = array
    whole = launch.upload(packed, device)
    return [whole[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)]
