"""One stage of a pipeline as a runner's `StepModel`: it gets hidden states from the stage before and passes its own on.

Ranks are numbered from the last stage on, so that rank 0 has the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagemill_engine.decoders.step_model import StepModel, StepTokens
from pagemill_kernels.arrays import Array
from pagemill_kernels.ranks.group import RankGroup
from pagemill_models.sharding.slices import Range, dealt
from pagemill_models.spec.model_spec import ModelSpec


class RankPlace(NamedTuple):
    """Where a rank is among `size` ranks that are divided into stages of equally many ranks."""

    layers: Range
    part: int
    """Its number among the ranks of its stage."""
    num_parts: int
    before: int | None
    """The rank that sends it hidden states; None: it embeds tokens."""
    behind: int | None
    """The rank that it sends hidden states to; None: it computes logits."""


def place_of(rank: int, size: int, num_stages: int, num_layers: int) -> RankPlace:
    """Return where a rank is. Stages have as many layers as the others, or one more: the earlier ones, since the last
    one has the head."""
    num_parts = size // num_stages
    turn, part = divmod(rank, num_parts)
    stage = num_stages - 1 - turn
    before = rank + num_parts if stage > 0 else None
    behind = rank - num_parts if turn > 0 else None
    return RankPlace(dealt(num_layers, num_stages)[stage], part, num_parts, before, behind)


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
