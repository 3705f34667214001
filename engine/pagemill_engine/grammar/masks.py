"""Computes the masks of a step's sequences on threads while the step runs; sampling reads them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from pagemill_engine.grammar.state import GrammarState


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
