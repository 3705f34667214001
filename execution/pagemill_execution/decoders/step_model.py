"""The model interface of the CPU runner, implemented by `decoders.native.decoder` and, on torch, by
`runners.torch_model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.arrays import Array
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_models.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from pagemill_kernels.recurrent.batch import StateBatch


class CachedTokens(NamedTuple):
    """The step's tokens in the caches of one kind."""

    slots: NDArray[np.int64]
    """Slot of each token's keys and values: block id * block size + offset."""
    attention: AttentionBatch


class StateArrays(NamedTuple):
    """What a recurrent layer keeps, all float32. Slots and rows are those of a `StateBatch`."""

    states: Array
    """[slots, shape of the state]."""
    windows: Array
    """[slots, width - 1, channels]: the values before each state's boundary that a convolution reads."""
    log: Array
    """[rows, tokens of a block and as many as may be proposed, inputs_per_token]: the tokens since the state."""
    inputs: Array
    """[rows, width - 1 and as many as may be proposed, channels]: the last values of each row before the tokens that
    were proposed in its last step, and those of these tokens."""
    vectors: Array | None = None
    """Keys and values of attention in the same layer."""


LayerCache = Array | StateArrays


class StepTokens(NamedTuple):
    """A step's flattened batch."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Position of each token in its request."""
    caches: Mapping[int | None, CachedTokens]
    """By the windows of the model's layers."""
    hidden: Array | None = None
    """What the stage before has computed, or what a head reads, float32 [tokens, hidden]; None where tokens are
    embedded."""
    token_types: NDArray[np.int64] | None = None
    """1 for the tokens of a pair's second text; only for models that distinguish them."""
    states: StateBatch | None = None
    """What recurrent layers read and write; None: the model has none."""


class StepModel(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in memory."""
        ...

    @property
    def classifier(self) -> Callable[[Array], Array] | None:
        """Maps pooled hidden states, float32 [prompts, hidden], to float32 [prompts, labels]; None if there is no
        classifier."""
        ...

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        """Use these caches, one per layer, until the next call. An empty sequence releases them."""
        ...

    def hidden(self, step: StepTokens, adapters: Any = None) -> Array:
        """Return normalised hidden states, [tokens, hidden] of a float type.

        `adapters`: of the step's tokens, in the form of the model's kernels; None: no token has one.
        """
        ...

    def logits(self, hidden: Array, adapters: Any = None) -> Array:
        """Return logits, float32 [rows, vocab], in memory of the caller's own. hidden: [rows, hidden].

        `adapters`: of these rows.
        """
        ...


class WrappedModel:
    """A `StepModel` that leaves all to another one; what is added to it overrides `hidden` and `logits`."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def num_bytes(self) -> int:
        return self._model.num_bytes

    @property
    def classifier(self) -> Callable[[Array], Array] | None:
        return self._model.classifier

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        self._model.use_caches(caches)

    def hidden(self, step: StepTokens, adapters: Any = None) -> Array:
        return self._model.hidden(step, adapters)

    def logits(self, hidden: Array, adapters: Any = None) -> Array:
        return self._model.logits(hidden, adapters)


class TargetModel(StepModel, Protocol):
    """A model for which a head drafts."""

    def keep_before(self, layers: Sequence[int]) -> None:
        """From now on keep the hidden states before these layers of each step's tokens."""
        ...

    @property
    def kept(self) -> Sequence[Array]:
        """The hidden states before these layers, [tokens, hidden] each, of the last step."""
        ...

    def embed(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Array:
        """Return what the first layer reads, [tokens, hidden]."""
        ...


class DividedTarget(WrappedModel):
    """A rank's part of a `TargetModel`: its layers keep hidden states, which all ranks have whole. What heads ask it
    for between its steps, when other ranks compute nothing, another model has whole."""

    def __init__(self, part: TargetModel, whole: TargetModel) -> None:
        """`whole`: the model's embedding and head, without its layers."""
        super().__init__(whole)
        self._part, self._whole = part, whole
        self.keep_before, self.embed = part.keep_before, whole.embed

    @property
    def spec(self) -> ModelSpec:
        return self._part.spec

    @property
    def kept(self) -> Sequence[Array]:
        return self._part.kept
