"""From the hidden states of prompts to what requests for vectors and scores get.

Pooling itself is of one prompt at a time, so that its result does not depend on the others of the step. Runners say
which hidden states are whose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from pagemill_engine.models.classifier import Classifier
from pagemill_engine.runner.errors import NON_FINITE
from pagemill_engine.scheduler.step import StepResult
from pagemill_protocol.pooling import PoolingParams, PoolingSpec


class Pooler:
    def __init__(self, spec: PoolingSpec, classifier: Classifier | None) -> None:
        self.spec = spec
        self._classifier = classifier

    def pool(self, hidden: Tensor) -> Tensor:
        """hidden: [tokens, hidden] of one prompt. Returns float32 [hidden]."""
        if self.spec.method == "cls":
            return hidden[0].float()
        if self.spec.method == "last":
            return hidden[-1].float()
        return hidden.float().mean(0)

    def finish(self, names: Sequence[str], pooled: Tensor, params: Sequence[PoolingParams]) -> StepResult:
        """pooled: float32 [prompts, hidden], of the requests `names`."""
        values = pooled if self._classifier is None else self._classifier(pooled)
        if self.spec.sigmoid:
            values = values.sigmoid()
        finite = values.isfinite().all(1).tolist()
        result = StepResult()
        for name, row, wanted, is_finite in zip(names, values, params, finite, strict=True):
            if is_finite:
                result.pooled[name] = self._cut(row, wanted).cpu().numpy().tobytes()
            else:
                result.failed[name] = NON_FINITE
        return result

    def _cut(self, row: Tensor, wanted: PoolingParams) -> Tensor:
        row = row[: wanted.dimensions] if wanted.dimensions is not None else row
        return F.normalize(row, dim=0) if self.spec.normalized else row
