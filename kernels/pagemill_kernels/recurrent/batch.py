"""The rows of a step for recurrent layers as plain arrays, the same for every device and layer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class StateBatch(NamedTuple):
    """What the requests of a step read and write, in the order of the batch."""

    rows: Ints
    """[requests]: where their logs are."""
    query_start_loc: Ints
    """[requests + 1]: first token of each."""
    sources: Ints
    """[requests]: slots of their states; that of the padding block is the zero state."""
    num_logged: Ints
    """[requests]: tokens since their states."""
    writes: Ints
    """[states to write, 3]: request, blocks behind its state, slot. Of a request they rise."""
    block_size: int
    num_accepted: Ints | None = None
    """[requests]: of the tokens that were proposed in their last steps, those that they keep, which are the last of
    their logs; None: no request has some."""
    num_proposed: Ints | None = None
    """[requests]: of their tokens, the last ones, which the next step may take back; None: no request has some."""
    num_computed: Ints | None = None
    """[requests]: tokens before the step; only devices need them."""

    @property
    def write_starts(self) -> Ints:
        """[requests + 1]: first of the writes of each."""
        counts = np.bincount(self.writes[:, 0], minlength=len(self.rows))
        return np.concatenate(([0], np.cumsum(counts)))


_NOTHING = np.zeros(0, dtype=np.int64)
NO_STATES = StateBatch(
    _NOTHING, np.zeros(1, dtype=np.int64), _NOTHING, _NOTHING, _NOTHING.reshape(0, 3), 1, num_computed=_NOTHING
)
"""Of a step without requests."""
