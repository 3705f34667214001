"""A head that drafts tokens (`decoders.on_torch.heads`) as a `StepModel`, with the hidden states that it reads.

What the head shares with its target, embedding or head of logits, it asks the target for. `drafter` runs it; heads with
a plain layer run by `decoders.native.head`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_execution.decoders.head_states import HeadStates
from pagemill_execution.decoders.on_torch.context import ALONE, ForwardContext
from pagemill_execution.decoders.on_torch.heads import HeadLayers
from pagemill_execution.decoders.step_model import LayerCache, TargetModel
from pagemill_execution.runners.torch_model import TorchModel, rotations_of
from pagemill_execution.sizing.compute import Compute
from pagemill_execution.weights.source import WeightSource
from pagemill_kernels.adapters.rows import AdapterRows
from pagemill_kernels.arrays import Array
from pagemill_kernels.torch_arrays import TORCH_TYPES, from_torch, to_torch
from pagemill_models.spec.model_spec import ModelSpec


class TorchHead(HeadStates, TorchModel):
    def __init__(
        self,
        spec: ModelSpec,
        compute: Compute,
        weights: WeightSource,
        max_model_len: int,
        target: TargetModel,
        token_ids: NDArray[np.int64] | None,
    ) -> None:
        """Load a head for `target`; arguments as for `HeadStates`. Raises `WeightsError`."""

        def embed(tokens: Tensor, context: ForwardContext) -> Tensor:
            return to_torch(target.embed(from_torch(tokens), from_torch(context.positions)))

        self._layers = HeadLayers(spec, compute.ops, TORCH_TYPES[compute.activation_dtype], weights, embed)
        TorchModel.__init__(self, self._layers, compute.ops, rotations_of(spec, compute, weights, max_model_len))
        HeadStates.__init__(self, spec, target, token_ids)

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        super().use_caches(self.keep_in(caches))

    def states(self, side_by_side: Array) -> Array:
        assert self._layers.states is not None
        with torch.inference_mode():
            return from_torch(self._layers.states(to_torch(side_by_side).to(self._layers.dtype), ALONE))

    def logits(self, hidden: Array, adapters: AdapterRows | None = None) -> Array:
        if self.token_ids is None:
            return self.target.logits(hidden)
        return self.of_target(super().logits(hidden))
