"""A head that drafts tokens (`decoders.on_torch.heads`) as a `StepModel`, with the hidden states that it reads.

These are cached like keys and values, behind the head's layer: whatever holds for blocks, holds for them. What the head
shares with its target, embedding or head of logits, it asks the target for. `drafter` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_engine.decoders.on_torch.context import ALONE, ForwardContext
from pagemill_engine.decoders.on_torch.heads import HeadLayers
from pagemill_engine.decoders.step_model import LayerCache, TargetModel
from pagemill_engine.executing.torch_model import TorchModel, rotations_of
from pagemill_engine.sizing.compute import Compute
from pagemill_engine.weights.source import WeightSource
from pagemill_kernels import arrays
from pagemill_kernels.adapters.rows import AdapterRows
from pagemill_kernels.arrays import Array
from pagemill_kernels.torch_arrays import TORCH_TYPES, from_torch, to_torch
from pagemill_models.spec.model_spec import ModelSpec

_NO_STATES: Array = np.zeros((0, 1, 0), dtype=np.float32)


class TorchHead(TorchModel):
    def __init__(
        self,
        spec: ModelSpec,
        compute: Compute,
        weights: WeightSource,
        max_model_len: int,
        target: TargetModel,
        token_ids: NDArray[np.int64] | None,
    ) -> None:
        """Load a head for `target`. `token_ids`: the tokens of the head's own vocabulary; None: it uses the target's
        head. Raises `WeightsError`."""

        def embed(tokens: Tensor, context: ForwardContext) -> Tensor:
            return to_torch(target.embed(from_torch(tokens), from_torch(context.positions)))

        layers = HeadLayers(spec, compute.ops, TORCH_TYPES[compute.activation_dtype], weights, embed)
        super().__init__(layers, compute.ops, rotations_of(spec, compute, weights, max_model_len))
        self._layers, self._target, self._token_ids = layers, target, token_ids
        reads = spec.decoder.reads
        assert reads is not None
        self.reads = reads.layers_of(target.spec.num_layers)
        """The layers of the target before which it reads hidden states; none: the target's normalised last ones."""
        target.keep_before(self.reads)
        self._states = _NO_STATES

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        super().use_caches(caches[:-1])
        self._states = _NO_STATES
        for states in caches[-1:]:
            assert isinstance(states, np.ndarray)
            self._states = states[:, 0]

    def keep_states(self, slots: NDArray[np.int64], last: Array) -> None:
        """Keep what the target has computed of its last step's tokens. `last`: their normalised hidden states."""
        states = last
        if self._layers.states is not None:
            with torch.inference_mode():
                side_by_side = to_torch(np.concatenate([arrays.widened(each) for each in self._target.kept], axis=1))
                states = from_torch(self._layers.states(side_by_side.to(self._layers.dtype), ALONE))
        blocks, offsets = np.divmod(slots, self._states.shape[1])
        values = arrays.widened(states)
        is_short = self._states.dtype == np.uint16
        self._states[blocks, offsets] = arrays.rounded(values) if is_short else values

    def states_of(self, slots: NDArray[np.int64]) -> Array:
        """Return what was kept of tokens."""
        blocks, offsets = np.divmod(slots, self._states.shape[1])
        return arrays.widened(self._states[blocks, offsets])

    def logits(self, hidden: Array, adapters: AdapterRows | None = None) -> Array:
        if self._token_ids is None:
            return self._target.logits(hidden)
        own = super().logits(hidden)
        logits = np.full((len(own), self._target.spec.vocab_size), -np.inf, dtype=np.float32)
        logits[:, self._token_ids] = own
        return logits
