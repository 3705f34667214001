"""The inputs of a forward pass besides token ids. The runner builds them once per step, and every layer reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pagemill_kernels.adapters.rows import AdapterRows
from pagemill_kernels.ranks.group import RankGroup


class ProductContext(Protocol):
    """What a linear layer needs besides its input."""

    @property
    def adapters(self) -> AdapterRows | None:
        """The adapters of the input's rows; None: no row has one."""
        ...

    @property
    def group(self) -> RankGroup[Tensor] | None:
        """The ranks that compute this model together; None: this is the only one."""
        ...


@dataclass(slots=True, frozen=True)
class RowsContext:
    """The context of products over rows of their own, such as those of the head."""

    adapters: AdapterRows | None = None
    group: RankGroup[Tensor] | None = None


ALONE = RowsContext()


class StateTensors(NamedTuple):
    """What a recurrent layer keeps, float32, as in `step_model.StateArrays`."""

    states: Tensor
    windows: Tensor
    log: Tensor
    inputs: Tensor
    vectors: Tensor | None = None


@dataclass(slots=True, frozen=True)
class ForwardContext:
    positions: Tensor
    """int64 [tokens]: position of each token in its request."""
    rotations: list[tuple[Tensor, Tensor]]
    """cos and sin of the positions, each [tokens, 1, head_dim / 2], for each rotary embedding of the model."""
    kv_caches: Sequence[Tensor | StateTensors]
    """One per layer; the layout is in `pagemill_kernels.kv_store`."""
    kv_slots: dict[int | None, Tensor]
    """int64 [tokens]: the slots of this step's keys and values, for each distinct window of the model."""
    attention_plans: dict[int | None, Any]
    """A plan for each distinct sliding window of the model; `None` is full attention."""
    token_types: Tensor | None = None
    """int64 [tokens]: 1 for the tokens of a pair's second text; only for models that distinguish them."""
    hidden: Tensor | None = None
    """What the stage before has computed, [tokens, hidden]; None where tokens are embedded."""
    adapters: AdapterRows | None = None
    """The adapters of the step's tokens."""
    group: RankGroup[Tensor] | None = None
    """The ranks that compute this model together."""
    layer_inputs: Tensor | None = None
    """What the model's layers read of the tokens beside the hidden states (`LayerInputsSpec`), [tokens, layers x
    size]."""
    states: Any = None
    """The step's rows for recurrent layers, as `Ops.plan_states` returns them; None: the model has none."""

    def vectors(self, layer: int) -> Tensor:
        """Return the cache of a layer's keys and values."""
        cache = self.kv_caches[layer]
        vectors = cache.vectors if isinstance(cache, StateTensors) else cache
        assert vectors is not None
        return vectors

    def state(self, layer: int) -> StateTensors:
        """Return what a recurrent layer keeps."""
        cache = self.kv_caches[layer]
        assert isinstance(cache, StateTensors)
        return cache
