"""What the CPU runner asks of a model, whatever computes it: `native.decoder`, or torch behind `runner.torch_model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.arrays import Array
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_protocol.model_spec import ModelSpec


class StepTokens(NamedTuple):
    """A step's flattened batch."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Of each token in its request."""
    slots: NDArray[np.int64]
    """Where each token's keys and values go: row of the cache * block size + offset."""
    attention: AttentionBatch


class StepModel(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    @property
    def num_bytes(self) -> int:
        """Memory of its weights."""
        ...

    @property
    def classifier(self) -> Callable[[Array], Array] | None:
        """From pooled hidden states, float32 [prompts, hidden], to float32 [prompts, labels]; `None`: it has none."""
        ...

    def use_caches(self, caches: Sequence[Array]) -> None:
        """One a layer, for all steps until the next call; none: they are gone."""
        ...

    def hidden(self, step: StepTokens) -> Array:
        """Normalised hidden states, [tokens, hidden] of a float type."""
        ...

    def logits(self, hidden: Array) -> Array:
        """hidden: [rows, hidden]. Returns float32 [rows, vocab], the caller's own."""
        ...
