"""From the hidden states of prompts to what requests for vectors and scores get.

Pooling itself is of one prompt at a time, so that its result does not depend on the others of the step. Runners say
which hidden states are whose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagemill_engine.runner.errors import NON_FINITE
from pagemill_engine.scheduler.step import StepResult
from pagemill_kernels.arrays import Array, widened
from pagemill_protocol.pooling import PoolingParams, PoolingSpec

Values = NDArray[np.float32]
SMALLEST_LENGTH = 1e-12
"""A vector that is shorter is divided by this."""


class Pooler:
    def __init__(self, spec: PoolingSpec, classifier: Callable[[Array], Array] | None) -> None:
        """`classifier`: as `StepModel` has it."""
        self.spec = spec
        self._classifier = classifier

    def pool(self, hidden: Array) -> Values:
        """hidden: [tokens, hidden] of one prompt. Returns float32 [hidden]."""
        if self.spec.method == "cls":
            return widened(hidden[0])
        if self.spec.method == "last":
            return widened(hidden[-1])
        return widened(hidden).mean(0)

    def finish(self, names: Sequence[str], pooled: Values, params: Sequence[PoolingParams]) -> StepResult:
        """pooled: [prompts, hidden], of the requests `names`."""
        values = pooled if self._classifier is None else self._classifier(pooled)
        if self.spec.sigmoid:
            values = _sigmoid(values)
        finite = np.isfinite(values).all(1).tolist()
        result = StepResult()
        for name, row, wanted, is_finite in zip(names, values, params, finite, strict=True):
            if is_finite:
                result.pooled[name] = self._cut(row, wanted).tobytes()
            else:
                result.failed[name] = NON_FINITE
        return result

    def _cut(self, row: Values, wanted: PoolingParams) -> Values:
        row = row[: wanted.dimensions] if wanted.dimensions is not None else row
        if not self.spec.normalized:
            return row
        return row / np.maximum(np.sqrt(np.square(row).sum()), np.float32(SMALLEST_LENGTH))


def _sigmoid(values: Values) -> Values:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-values))
