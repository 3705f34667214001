"""The logits of a head that several processes of one machine divide: one array, of which each writes its columns.

Nothing is copied, and followers keep no logits. Larger steps than it has rows for exchange by `RankGroup.gather`.
"""

from __future__ import annotations

import ctypes

import numpy as np

from pagemill_kernels.arrays import Array
from pagemill_kernels.ranks.memory import SharedMemory
from pagemill_kernels.ranks.places import LOGITS
from pagemill_kernels.ranks.shared_memory import SharedMemoryGroup


def logits_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the bytes of the shared memory of an array."""
    return num_rows * vocab_size * 4


class SharedLogits:
    def __init__(
        self, memory: SharedMemory, group: SharedMemoryGroup, vocab_size: int, columns: tuple[int, int]
    ) -> None:
        """Map the array. `memory`: of `logits_bytes`. `columns`: those of this rank, the first and the one behind the
        last."""
        self.num_rows = memory.num_bytes // logits_bytes(1, vocab_size)
        values = (ctypes.c_float * (self.num_rows * vocab_size)).from_address(memory.address)
        self._array: Array = np.ctypeslib.as_array(values).reshape(self.num_rows, vocab_size)
        self._memory, self._group, self._columns = memory, group, slice(*columns)

    def own(self, num_rows: int) -> Array:
        """Wait until no rank reads the last logits. Returns the rows and columns to write."""
        self._group.meet(LOGITS)
        return self._array[:num_rows, self._columns]

    def whole(self, num_rows: int) -> Array:
        """Wait until all ranks have written. Returns all columns, until the next call of `own`."""
        self._group.meet(LOGITS)
        return self._array[:num_rows]
