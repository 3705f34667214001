"""Where one sequence is in its grammar: which tokens may follow, and whether it has ended.

The scheduler keeps one for each sequence that has a form and advances it by every token it takes. It outlives a
preemption, because a sequence's tokens only grow; a sequence that comes from another engine replays them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray


class GrammarState:
    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int], vocab_size: int, keeps_on: bool) -> None:
        """`matcher` becomes this state's own. `keeps_on`: no end-of-sequence token while anything else may follow."""
        self.mask: NDArray[np.int32] = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        """A bit for each token that may follow."""
        self.ended = False
        """No text may follow."""
        self.is_free = False
        self._matcher = matcher
        self._keeps_on = keeps_on
        self._ends = np.zeros_like(self.mask)
        bits = self._ends.view(np.uint32)
        for token_id in eos_token_ids:
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._words = np.flatnonzero(bits)
        self._find_mask()

    def advance(self, token_id: int) -> str:
        """Take the next token. Returns what is wrong with it; empty: nothing."""
        if not self._matcher.consume_token(token_id):
            return f"token {token_id} does not fit its form: {self._fault()}"
        self._find_mask()
        return f"its form became too complex: {self._fault()}" if self._matcher.is_error() else ""

    def _fault(self) -> str:
        return " ".join(self._matcher.get_error().split("<")[0].split())[:200]

    def _find_mask(self) -> None:
        if self._matcher.is_stopped():
            self.ended = True
            return
        mask = self.mask
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        ends = mask[self._words]
        if not (ends & self._ends[self._words]).any():
            return
        mask[self._words] &= ~self._ends[self._words]
        self.ended = not mask.any()
        if not self._keeps_on:
            mask[self._words] = ends
