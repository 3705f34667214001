"""One stage of a pipeline as a runner's `StepModel`: it gets hidden states from the stage before and passes its own on.

`sizing.rank_parts` says where a rank is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pagemill_engine.decoders.step_model import StepModel, StepTokens
from pagemill_engine.sizing.rank_parts import RankPlace
from pagemill_kernels.arrays import Array
from pagemill_kernels.ranks.group import RankGroup
from pagemill_models.spec.model_spec import ModelSpec


class StagedModel:
    def __init__(self, model: StepModel, group: RankGroup[Array], place: RankPlace) -> None:
        self._model, self._group, self._place = model, group, place

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def num_bytes(self) -> int:
        return self._model.num_bytes

    @property
    def classifier(self) -> Callable[[Array], Array] | None:
        return self._model.classifier

    def use_caches(self, caches: Sequence[Array]) -> None:
        self._model.use_caches(caches)

    def hidden(self, step: StepTokens, adapters: Any = None) -> Array:
        if self._place.before is not None:
            given = np.empty((len(step.token_ids), self.spec.hidden_size), dtype=np.float32)
            self._group.receive(given, self._place.before)
            step = step._replace(hidden=given)
        found = self._model.hidden(step, adapters)
        if self._place.behind is not None:
            self._group.send(found, self._place.behind)
        return found

    def logits(self, hidden: Array, adapters: Any = None) -> Array:
        return self._model.logits(hidden, adapters)
