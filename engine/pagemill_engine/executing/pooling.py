"""Pools the hidden states of prompts into vectors and scores.

Each prompt is pooled alone, so that its result does not depend on the others of the step. Runners assign hidden states
to prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pagemill_engine.executing.errors import NON_FINITE
from pagemill_engine.scheduler.step import StepResult
from pagemill_kernels.arrays import Array, widened
from pagemill_protocol.request.pooling import PoolingParams, PoolingSpec

SMALLEST_LENGTH = 1e-12
"""The smallest length by which a vector is divided."""


class Pooler:
    def __init__(self, spec: PoolingSpec, classifier: Callable[[Array], Array] | None) -> None:
        """Create a pooler. `classifier`: that of `StepModel`, or None."""
        self.spec = spec
        self._classifier = classifier

    def pool(self, hidden: Array) -> Array:
        """Pool one prompt. `hidden`: [tokens, hidden]. Returns float32 [hidden]."""
        if self.spec.method == "cls":
            return widened(hidden[0])
        if self.spec.method == "last":
            return widened(hidden[-1])
        mean: Array = widened(hidden).mean(0)
        return mean

    def finish(self, names: Sequence[str], pooled: Array, params: Sequence[PoolingParams]) -> StepResult:
        """Return the result of pooled prompts. `pooled`: float32 [prompts, hidden], in the order of `names`."""
        values = pooled if self._classifier is None else self._classifier(pooled)
        if self.spec.sigmoid:
            values = _sigmoid(values)
        finite = np.atleast_1d(np.isfinite(values).all(1))
        result = StepResult()
        for name, row, wanted, is_finite in zip(names, values, params, finite, strict=True):
            if is_finite:
                result.pooled[name] = self._cut(row, wanted).tobytes()
            else:
                result.failed[name] = NON_FINITE
        return result

    def _cut(self, row: Array, wanted: PoolingParams) -> Array:
        row = row[: wanted.dimensions] if wanted.dimensions is not None else row
        if not self.spec.normalized:
            return row
        length = np.sqrt(np.square(row).sum())
        normalized: Array = row / np.maximum(length, np.float32(SMALLEST_LENGTH))
        return normalized


def _sigmoid(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-values))
