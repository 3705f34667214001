"""Computes the costs of many pods at once: `cost_terms` with arrays that are updated when a pod changes.

A decision among a hundred pods takes little longer than one among ten. Below `LEAST_PODS` pods a loop is faster.
Results are bit-identical to the sum of `cost_terms`, so that ties are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagemill_protocol.report.step_time import StepTimePieces
from pagemill_routing.policies.cost_terms import CostBasis, cost_terms
from pagemill_routing.policies.policy import Candidate

LEAST_PODS = 24
_ROW_SPAN = 2.0**40
"""The distance between the knots of two rows, larger than the tokens of any step."""

Floats = NDArray[np.float64]


class CostTable:
    def __init__(self, num_pods: int) -> None:
        self._bases: list[CostBasis | None] = [None] * num_pods
        self._num_unknown = num_pods
        self._columns: Floats = np.zeros((9, num_pods))
        """The values of `_row`, one row per value and one column per pod."""
        self._pieces: list[StepTimePieces | None] = [None] * num_pods
        self._rows = np.arange(num_pods)
        self._set_width(1)

    def update(self, place: int, candidate: Candidate) -> None:
        basis: CostBasis | None = candidate.derived
        self._num_unknown += (basis is None) - (self._bases[place] is None)
        self._bases[place] = basis
        if basis is None:
            return
        self._columns[:, place] = _row(basis)
        pieces = basis.pieces
        if self._pieces[place] is not pieces:
            self._pieces[place] = pieces
            if len(pieces.values) > self._width:
                self._set_width(len(pieces.values))
            else:
                self._set_pieces(place, pieces)

    @property
    def is_complete(self) -> bool:
        """Whether the costs of all pods are known."""
        return not self._num_unknown

    def costs(self, num_prompt_tokens: int, num_output_tokens: float, cached: Sequence[int] | None) -> list[float]:
        """Return the cost of each pod for a request that has `cached` tokens there; `None` if it has none anywhere."""
        (
            without_wait, num_ahead, ahead_products, num_running, budget, full_ms, step_ms, harm_ms, context_ms,
        ) = self._columns  # fmt: skip
        num_cached: Floats | int = 0 if cached is None else np.array(cached, dtype=np.float64)
        num_uncached = max(1, num_prompt_tokens) if cached is None else np.maximum(1, num_prompt_tokens - num_cached)
        num_rest = num_ahead + num_uncached
        waits = num_rest >= without_wait
        num_full = np.floor((num_rest - 1) / budget)
        num_tokens = num_rest - num_full * budget + num_running
        piece = self._knots.searchsorted(num_tokens + self._row_starts, "right")
        piece += self._rows
        products = np.floor(num_uncached * (num_uncached / 2 + num_cached) + ahead_products)
        num_tokens -= self._low.take(piece)
        num_tokens *= self._slope_ms.take(piece)
        prefill_ms = self._low_ms.take(piece)
        prefill_ms += num_tokens
        prefill_ms += context_ms
        prefill_ms += self._chunk_context_ms * products
        num_full *= full_ms
        prefill_ms += num_full
        prefill_ms += step_ms
        prefill_ms += harm_ms * (num_uncached + num_output_tokens)
        costs: list[float] = prefill_ms.tolist()
        if np.count_nonzero(waits):
            self._wait(costs, np.flatnonzero(waits).tolist(), num_prompt_tokens, num_output_tokens, cached)
        return costs

    def _wait(
        self,
        costs: list[float],
        places: Sequence[int],
        num_prompt_tokens: int,
        num_output_tokens: float,
        cached: Sequence[int] | None,
    ) -> None:
        """Replace the costs of pods where the request waits for others to end."""
        bases = [basis for place in places if (basis := self._bases[place]) is not None]
        found = [cached[place] if cached is not None else 0 for place in places]
        terms = cost_terms(bases, found, num_prompt_tokens, num_output_tokens)
        for place, (step_ms, wait_ms, prefill_ms, harm_ms) in zip(places, terms, strict=True):
            costs[place] = step_ms + wait_ms + prefill_ms + harm_ms

    def _set_width(self, width: int) -> None:
        """Resize the arrays for models with this many pieces."""
        self._width, num_pods = width, len(self._rows)
        self._row_starts = self._rows * _ROW_SPAN
        # Missing knots of a row are at its middle, beyond all tokens and before the next row.
        self._knots: Floats = np.repeat(self._row_starts + _ROW_SPAN / 2, width - 1)
        # A search counts the knots of all rows before, of which each row has one less than pieces.
        self._low, self._low_ms, self._slope_ms = np.zeros((3, num_pods * width))
        self._chunk_context_ms: Floats = np.zeros(num_pods)
        for place, pieces in enumerate(self._pieces):
            if pieces is not None:
                self._set_pieces(place, pieces)

    def _set_pieces(self, place: int, pieces: StepTimePieces) -> None:
        first_knot, first, num_knots = place * (self._width - 1), place * self._width, len(pieces.inner_knots)
        self._knots[first_knot : first_knot + self._width - 1] = self._row_starts[place] + _ROW_SPAN / 2
        self._knots[first_knot : first_knot + num_knots] = np.array(pieces.inner_knots) + self._row_starts[place]
        low, low_ms, slope_ms = zip(*pieces.values, strict=True)
        self._low[first : first + len(low)] = low
        self._low_ms[first : first + len(low)] = low_ms
        self._slope_ms[first : first + len(low)] = slope_ms
        self._chunk_context_ms[place] = pieces.chunk_context_ms


def _row(basis: CostBasis) -> tuple[float, ...]:
    return (
        0.0 if basis.num_over_capacity else basis.num_tokens_without_wait,
        basis.num_ahead,
        basis.ahead_products,
        basis.num_decode_tokens,
        basis.budget,
        basis.full_ms,
        basis.step_ms,
        basis.harm_ms,
        basis.pieces.decode_context_ms * basis.num_context_tokens,
    )
