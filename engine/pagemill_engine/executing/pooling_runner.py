"""Runs a decoder whose hidden states are pooled: prompts are computed in chunks, and no token follows.

The sum for a mean is updated with every chunk. Everything else is `executing.eager`'s.
"""

from __future__ import annotations

import numpy as np

from pagemill_engine.decoders.step_model import StepModel
from pagemill_engine.executing.base import RunnerInfo
from pagemill_engine.executing.eager import EagerRunner
from pagemill_engine.executing.inputs import StepInputs
from pagemill_engine.executing.kv_cache import KVCache
from pagemill_engine.executing.pooling import Pooler
from pagemill_engine.scheduler.step import StepPlan, StepResult
from pagemill_kernels.arrays import Array, widened
from pagemill_protocol.request.pooling import PoolingParams


class PoolingRunner(EagerRunner):
    def __init__(
        self, model: StepModel, kv_cache: KVCache, info: RunnerInfo, max_num_seqs: int, pooler: Pooler
    ) -> None:
        super().__init__(model, kv_cache, info, max_num_seqs)
        self._pooler = pooler
        self._params: dict[str, PoolingParams] = {}
        self._so_far: dict[str, Array] = {}
        """Partial results of prompts that are partly computed: the sum of hidden states, or the first one."""

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
            vector = self._add(name, hidden[starts[index] : starts[index + 1]])
            if name in plan.samples:
                names.append(name)
                pooled.append(vector / int(inputs.seq_lens[index]) if self._pooler.spec.method == "mean" else vector)
        self._rows.advance(inputs._replace(sampling=np.zeros(0, dtype=np.int64)), np.zeros(0, dtype=np.int64))
        if not names:
            return StepResult()
        return self._scrubbed(self._pooler.finish(names, np.stack(pooled), [self._params[name] for name in names]))

    def _add(self, name: str, hidden: Array) -> Array:
        """Return the partial result of a prompt including `hidden`."""
        before, method = self._so_far.get(name), self._pooler.spec.method
        if method == "last":
            return widened(hidden[-1])
        if method == "cls":
            vector = widened(hidden[0]) if before is None else before
        else:
            vector = widened(hidden).sum(0) if before is None else before + widened(hidden).sum(0)
        self._so_far[name] = vector
        return vector
