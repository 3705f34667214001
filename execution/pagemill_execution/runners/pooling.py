"""Pools the hidden states of prompts into vectors and scores.

Each prompt is pooled alone, so that its result does not depend on the others of the step. `PoolingRunner` runs
decoders, `encoder_runner` encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pagemill_execution.decoders.step_model import StepModel
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.runners.eager import EagerRunner
from pagemill_execution.runners.errors import NON_FINITE
from pagemill_execution.runners.inputs import StepInputs
from pagemill_execution.runners.kv_cache import KVCache
from pagemill_execution.step import StepPlan, StepResult
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
        return self.whole(self.add(None, hidden, 0), len(hidden))

    def add(self, before: Array | None, hidden: Array, start: int) -> Array:
        """Return the partial result of a prompt's tokens up to those of `hidden`, which begin at token `start`.
        `before`: that of the tokens before them, None for the first ones."""
        method = self.spec.method
        if method == "last":
            return widened(hidden[-1])
        if method == "cls":
            return widened(hidden[0]) if before is None else before
        values = widened(hidden)
        if method == "max":
            largest: Array = values.max(0)
            return largest if before is None else np.maximum(before, largest)
        if method == "weighted_mean":
            values = values * np.arange(start + 1, start + len(values) + 1, dtype=np.float32)[:, None]
        total: Array = values.sum(0)
        return total if before is None else before + total

    def whole(self, partial: Array, num_tokens: int) -> Array:
        """Return the result of a whole prompt by its partial result."""
        divisors = {
            "mean": num_tokens,
            "mean_sqrt_len": num_tokens**0.5,
            "weighted_mean": num_tokens * (num_tokens + 1) / 2,
        }
        divisor = divisors.get(self.spec.method)
        return partial if divisor is None else partial / np.float32(divisor)

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
        row = row if wanted.dimensions is None else row[: wanted.dimensions]
        if self.spec.normalized:
            row = row / np.maximum(np.sqrt(np.square(row).sum()), np.float32(SMALLEST_LENGTH))
        return row if wanted.dimensions is not None else row[: self.spec.default_dimensions]


class PoolingRunner(EagerRunner):
    """Runs a decoder whose hidden states are pooled: prompts are computed in chunks, and no token follows."""

    def __init__(
        self, model: StepModel, kv_cache: KVCache, info: RunnerInfo, max_num_seqs: int, pooler: Pooler
    ) -> None:
        super().__init__(model, kv_cache, info, max_num_seqs)
        self._pooler = pooler
        self._params: dict[str, PoolingParams] = {}
        self._so_far: dict[str, Array] = {}
        """Partial results of prompts that are partly computed, as `Pooler.add` returns them."""

    def _apply_differences(self, plan: StepPlan) -> None:
        for name in plan.released:
            self._params.pop(name, None)
            self._so_far.pop(name, None)
        for admitted in plan.admitted:
            self._params[admitted.request_id] = admitted.pooling or PoolingParams()
            self._so_far.pop(admitted.request_id, None)
        super()._apply_differences(plan)

    def _answer(self, plan: StepPlan, inputs: StepInputs, hidden: Array) -> StepResult:
        names, pooled = [], []
        starts = inputs.query_start_loc.tolist()
        for index, name in enumerate(inputs.request_ids):
            tokens, num_known = hidden[starts[index] : starts[index + 1]], int(inputs.seq_lens[index])
            partial = self._pooler.add(self._so_far.get(name), tokens, num_known - len(tokens))
            self._so_far[name] = partial
            if name in plan.samples:
                names.append(name)
                pooled.append(self._pooler.whole(partial, num_known))
        self._rows.advance(inputs._replace(sampling=np.zeros(0, dtype=np.int64)), np.zeros(0, dtype=np.int64))
        if not names:
            return StepResult()
        return self._scrubbed(self._pooler.finish(names, np.stack(pooled), [self._params[name] for name in names]))


def _sigmoid(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-values))
