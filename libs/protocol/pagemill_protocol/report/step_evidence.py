"""The evidence of a step-time model: an engine's steps by size, and a prior for other sizes.

Evidence is normal equations (XᵀWX and XᵀWy) of a linear model whose rows are divided by their step's time. New steps of
a size discount older steps of that size only, so an hour of single decodes neither erases nor outvotes what is known of
a step of 300 tokens. The prior is a few steps that are never discounted: they decide for sizes without steps, have
little weight elsewhere, and are scaled with the engine, since a calibration may have run while the machine was slow.
Neighbour: `step_time` makes the rows and solves the equations.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

MEMORY_STEPS = 200
"""Number of latest steps of one size that effectively count."""
PRIOR_STEPS = 2.0
"""Weight of each sample of a measured prior, in steps."""
GUESSED_STEPS = 0.02
"""Weight of each sample of a prior that was not measured, in steps."""
SCALE_WINDOW = 64
"""Number of latest steps whose median ratio to the prior scales the prior."""
_KEPT = 1 - 1 / MEMORY_STEPS


class StepEvidence:
    """Evidence of one model. Not thread-safe."""

    def __init__(self, prior_rows: Vector, prior_ms: Vector, num_steps: float) -> None:
        """Make evidence from a prior only.

        `prior_rows`: one row of features per sample. `prior_ms`: its time, above 0. `num_steps`: weight of each sample.
        """
        rows = prior_rows / prior_ms[:, None]
        self._num_weights = rows.shape[1]
        self._prior_information: Vector = num_steps * (rows.T @ rows)
        self._prior_target: Vector = num_steps * rows.sum(axis=0)
        self._cells: dict[Hashable, tuple[Vector, Vector]] = {}
        self._log_ratios: Vector = np.zeros(SCALE_WINDOW)
        self._num_ratios = 0
        self.leverage: Vector = np.square(rows).max(axis=0, initial=0.0)
        """The largest square of each feature in any row."""

    def observe(self, size: Hashable, row: Vector, ms: float, weight: float) -> None:
        """Add a step. `row` and `ms` are already divided by the step's scale; steps of equal `size` discount each
        other."""
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
        """Record the ratio of a step's time `ms` to the prior's `prior_ms`."""
        if prior_ms > 0:
            self._log_ratios[self._num_ratios % SCALE_WINDOW] = np.log(ms / prior_ms)
            self._num_ratios += 1

    def normal_equations(self) -> tuple[Vector, Vector]:
        """Return matrix and right side for all observed steps and the prior at the engine's scale."""
        scale = self.scale
        information = self._prior_information / (scale * scale)
        target = self._prior_target / scale
        for cell_information, cell_target in self._cells.values():
            information += cell_information
            target += cell_target
        return information, target

    @property
    def scale(self) -> float:
        """Median ratio of recent steps' times to the prior's; 1 without steps."""
        known = self._log_ratios[: min(self._num_ratios, SCALE_WINDOW)]
        return float(np.exp(np.median(known))) if known.size else 1.0
