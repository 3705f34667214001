"""The state of one sequence in its grammar: which tokens may follow, and whether the answer has ended.

The scheduler keeps one for each sequence with a form and advances it by every token. It outlives a preemption, because
a sequence's tokens only grow; a sequence from another engine replays its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray


class GrammarState:
    """`TokenState` of a sequence with a form."""

    is_free = False

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int], vocab_size: int, forbids_end: bool) -> None:
        """Take over `matcher`.

        `forbids_end`: whether end-of-sequence tokens are forbidden while any other token may follow.
        """
        self.matcher = matcher
        self.num_words = -(-vocab_size // 32)
        self.ended = False
        self._mask: NDArray[np.int32] = np.zeros(self.num_words, dtype=np.int32)
        self._is_due = False
        """Whether the mask after the newest token is not computed yet."""
        self._job: Future[None] | None = None
        """The job that computes the mask."""
        self._forbids_end = forbids_end
        self._ends = np.zeros_like(self._mask)
        bits = self._ends.view(np.uint32)
        for token_id in eos_token_ids:
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._words = np.flatnonzero(bits)
        self._update()

    @property
    def mask(self) -> NDArray[np.int32]:
        if self._job is not None:
            self._job.result()
            self._job = None
        elif self._is_due:
            self._compute()
        self._is_due = False
        return self._mask

    @property
    def due(self) -> GrammarState | None:
        return self if self._is_due and self._job is None else None

    @property
    def forced(self) -> Sequence[int]:
        return self.matcher.compute_ff_tokens() if self._is_due and self._job is None else ()

    def copy(self) -> GrammarState:
        mask = self.mask  # it is computed once for both
        twin = copy(self)
        twin.matcher, twin._mask = self.matcher.deep_copy(), mask.copy()
        return twin

    def wait_for(self, job: Future[None], mask: NDArray[np.int32]) -> None:
        """Use `mask` once `job` is done, which must be before the next token is taken."""
        self._job, self._mask = job, mask

    def advance(self, token_id: int) -> str:
        if self._job is not None:
            self._job.result()
        if not self.matcher.consume_token(token_id):
            return f"token {token_id} does not fit its form: {self._fault()}"
        self._update()
        return f"its form became too complex: {self._fault()}" if self.matcher.is_error() else ""

    def _fault(self) -> str:
        return " ".join(self.matcher.get_error().split("<")[0].split())[:200]

    def _update(self) -> None:
        """Determine whether the answer has ended. If it cannot end here, the mask may be computed later."""
        self._job = None
        if self.matcher.is_stopped():
            self.ended = True
            return
        self._is_due = not self.matcher.is_accepting()
        if self._is_due:
            return
        self._compute()
        mask = self._mask
        ends = mask[self._words]
        mask[self._words] &= ~self._ends[self._words]
        self.ended = not mask.any()
        if not self._forbids_end:
            mask[self._words] = ends

    def _compute(self) -> None:
        self.matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)


def begin_masks(states: Sequence[GrammarState]) -> None:
    """Start computing the masks. Each state's `mask` waits for its own from now on."""
    masks = np.zeros((len(states), states[0].num_words), dtype=np.int32)
    matchers = [(state.matcher, row) for row, state in enumerate(states)]
    job = _thread().submit(_fill, matchers, masks)
    for state, mask in zip(states, masks, strict=True):
        state.wait_for(job, mask)


def _fill(matchers: list[tuple[LLMatcher, int]], masks: NDArray[np.int32]) -> None:
    _executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="masks")


@cache
def _executor() -> LLExecutor:
    """Return the executor, which releases the interpreter lock while it computes."""
    return LLExecutor()
