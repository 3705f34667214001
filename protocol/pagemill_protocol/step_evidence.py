"""What a step-time model knows of an engine's steps: the steps themselves, by their size, and a prior for other sizes.

Evidence is normal equations (XᵀWX and XᵀWy) of a linear model whose rows are divided by the time that they took. Steps
of each size forget steps of that size only, so an hour of single decodes neither erases what a step of 300 tokens takes
nor outvotes it. The prior is a few steps that are never forgotten: they decide where no step has been, hardly count
where steps are, and follow the engine in scale, since a calibration may have run while the machine was slow.
Neighbour: `step_time` makes the rows and solves the equations.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

MEMORY_STEPS = 200
"""Steps of one size that count."""
PRIOR_STEPS = 2.0
"""Steps that each sample of a prior counts as."""
GUESSED_STEPS = 0.02
"""The same where nothing was measured."""
SCALE_WINDOW = 64
"""Steps whose median says how much slower or faster than the prior the engine is."""
_KEPT = 1 - 1 / MEMORY_STEPS


class StepEvidence:
    """Not thread-safe."""

    def __init__(self, prior_rows: Vector, prior_ms: Vector, num_steps: float) -> None:
        """One row of features and one time, above 0, for each sample of the prior, which count as so many steps."""
        rows = prior_rows / prior_ms[:, None]
        self._num_weights = rows.shape[1]
        self._prior_information: Vector = num_steps * (rows.T @ rows)
        self._prior_target: Vector = num_steps * rows.sum(axis=0)
        self._cells: dict[Hashable, tuple[Vector, Vector]] = {}
        self._log_ratios: Vector = np.zeros(SCALE_WINDOW)
        self._num_ratios = 0
        self.leverage: Vector = np.square(rows).max(axis=0, initial=0.0)
        """The largest square of each feature of a row."""

    def observe(self, size: Hashable, row: Vector, ms: float, weight: float) -> None:
        """`row` and `ms` are divided by what scales the step. Steps of equal `size` forget each other."""
        cell = self._cells.get(size)
        if cell is None:
            cell = np.zeros((self._num_weights, self._num_weights)), np.zeros(self._num_weights)
            self._cells[size] = cell
        information, target = cell
        weighted = weight * row
        information *= _KEPT
        information += weighted[:, None] * row
        target *= _KEPT
        target += weighted * ms
        np.maximum(self.leverage, row * row, out=self.leverage)

    def compare(self, ms: float, prior_ms: float) -> None:
        """A step took `ms` and by the prior `prior_ms`."""
        if prior_ms > 0:
            self._log_ratios[self._num_ratios % SCALE_WINDOW] = np.log(ms / prior_ms)
            self._num_ratios += 1

    def normal_equations(self) -> tuple[Vector, Vector]:
        """Matrix and right side of what has been observed and of the prior at the engine's scale."""
        scale = self.scale
        information = self._prior_information / (scale * scale)
        target = self._prior_target / scale
        for cell_information, cell_target in self._cells.values():
            information += cell_information
            target += cell_target
        return information, target

    @property
    def scale(self) -> float:
        """Times of recent steps over those that the prior says."""
        known = self._log_ratios[: min(self._num_ratios, SCALE_WINDOW)]
        return float(np.exp(np.median(known))) if known.size else 1.0
