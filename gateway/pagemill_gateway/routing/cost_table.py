"""The cost of one request on many pods at once: `routing.cost_terms` over arrays, operation by operation.

Sums are made in the same order, so a cost has the same bits and a tie there is a tie here. A column is written again
only when a pod's basis is another object than before. With few pods the loop of `cost_terms` is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagemill_gateway.routing.cost_terms import CostBasis
from pagemill_protocol.step_time import StepTimeModel

MANY = 16
"""From so many pods on arrays are faster."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class CostTable:
    """Bases of the pods that were compared last, as arrays."""

    def __init__(self) -> None:
        self._bases: list[CostBasis] = []
        self._floats: Floats = np.zeros((0, 0))
        self._ints: Ints = np.zeros((0, 0), np.int64)
        self._models: list[StepTimeModel] = []
        self._num_pieces = 0
        """Of the model that has the most; others are padded."""
        self._knots: Floats = np.zeros((0, 0))
        self._pieces: Floats = np.zeros((3, 0))
        """Begin, milliseconds there and slope of every piece of every pod."""
        self._first_piece: Ints = np.zeros(0, np.int64)
        self._context: Floats = np.zeros((2, 0))
        """Milliseconds of each pod's contexts, and per product of a chunk with its context."""

    def costs(
        self, bases: Sequence[CostBasis], cached: Sequence[int], num_prompt_tokens: int, num_output_tokens: float
    ) -> list[float]:
        """The sum of the four `CostTerms` for each pod."""
        self._update(bases)
        ahead_products, full_ms, step_ms, decode_ms, harm_ms, num_tokens_without_wait = self._floats
        num_running, num_ahead, budget, num_over_capacity, max_num_seqs, block_size, num_available, num_active = (
            self._ints
        )
        uncached: int | Ints = max(1, num_prompt_tokens)
        own_products: float | Floats = uncached * (uncached / 2)
        if any(cached):
            there = np.array(cached, np.int64)
            uncached = np.maximum(1, num_prompt_tokens - there)
            own_products = uncached * (uncached / 2 + there)
        work = num_ahead + uncached
        answer_ms = num_output_tokens * decode_ms
        wait_ms = num_over_capacity * answer_ms / max_num_seqs
        waits = work >= num_tokens_without_wait
        if waits.any():
            num_missing = work // block_size + 1 - num_available
            blocks_ms = np.divide(num_missing * answer_ms, num_active, out=np.zeros_like(wait_ms), where=waits)
            wait_ms = np.where(waits, np.maximum(wait_ms, blocks_ms), wait_ms)
        num_full = (work - 1) // budget
        rest = work - num_full * budget
        prefill_ms = num_full * full_ms + self._predict_ms(num_running + rest, own_products + ahead_products)
        costs: list[float] = (step_ms + wait_ms + prefill_ms + harm_ms * (uncached + num_output_tokens)).tolist()
        return costs

    def _predict_ms(self, num_tokens: Ints, products: Floats) -> Floats:
        """As `StepTimeModel.predict_ms`."""
        piece = self._first_piece + (num_tokens[:, None] >= self._knots).sum(axis=1)
        low, low_ms, slope_ms = self._pieces[:, piece]
        context_ms, product_ms = self._context
        ms = low_ms + slope_ms * (num_tokens - low) + context_ms + product_ms * np.floor(products)
        return np.maximum(ms, 0.0)

    def _update(self, bases: Sequence[CostBasis]) -> None:
        if len(bases) != len(self._bases) or max(len(each.model.pieces) for each in bases) > self._num_pieces:
            self._allocate(bases)
        known = self._bases
        for place, (basis, before) in enumerate(zip(bases, known, strict=True)):
            if basis is not before:
                self._write(place, basis)

    def _allocate(self, bases: Sequence[CostBasis]) -> None:
        num_pods = len(bases)
        self._num_pieces = num_pieces = max(len(each.model.pieces) for each in bases)
        self._floats, self._ints = np.zeros((6, num_pods)), np.ones((8, num_pods), np.int64)
        self._knots = np.full((num_pods, num_pieces - 1), np.inf)
        self._pieces, self._context = np.zeros((3, num_pods * num_pieces)), np.zeros((2, num_pods))
        self._first_piece = np.arange(num_pods) * num_pieces
        self._bases, self._models = list(bases), [each.model for each in bases]
        for place, basis in enumerate(bases):
            self._write_model(place, basis.model)
            self._write(place, basis)

    def _write(self, place: int, basis: CostBasis) -> None:
        self._bases[place] = basis
        if basis.model is not self._models[place]:
            self._write_model(place, basis.model)
        self._floats[:, place] = (
            basis.ahead_products,
            basis.full_ms,
            basis.step_ms,
            basis.decode_ms,
            basis.harm_ms,
            basis.num_tokens_without_wait,
        )
        self._ints[:, place] = (
            basis.num_running,
            basis.num_ahead,
            basis.budget,
            basis.num_over_capacity,
            max(1, basis.max_num_seqs),
            basis.block_size,
            basis.num_blocks_available,
            max(1, basis.num_blocks_active),
        )
        self._context[:, place] = (
            basis.model.decode_context_ms * basis.num_context_tokens,
            basis.model.chunk_context_ms,
        )

    def _write_model(self, place: int, model: StepTimeModel) -> None:
        self._models[place] = model
        num_pieces, first = len(model.pieces), place * self._num_pieces
        self._knots[place] = np.inf
        self._knots[place, : num_pieces - 1] = model.knots[: num_pieces - 1]
        self._pieces[:, first : first + num_pieces] = np.array(model.pieces).T
