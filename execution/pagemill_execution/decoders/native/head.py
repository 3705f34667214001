"""A head that drafts tokens, on the CPU without torch: its layer is the native call of decoders.

Heads of models that torch computes run by `runners.torch_head`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.decoders.fitting import check_tensors
from pagemill_execution.decoders.head_states import HeadStates
from pagemill_execution.decoders.native.layers import layer_bytes, layer_parts
from pagemill_execution.decoders.native.parts import Parts, norm_bytes, normalized
from pagemill_execution.decoders.rope import Rotations, decoder_tables
from pagemill_execution.decoders.step_model import LayerCache, StepTokens, TargetModel
from pagemill_execution.weights.source import WeightSource
from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array
from pagemill_kernels.decoder_layer.native import CacheAddresses, NativeLayers
from pagemill_kernels.native_ops import NativeOps
from pagemill_models.declaration.declaration import Shapes
from pagemill_models.spec.model_spec import ModelSpec


class NativeHead(HeadStates):
    """A `StepModel`, with the hidden states that it reads."""

    classifier = None

    def __init__(
        self,
        spec: ModelSpec,
        ops: NativeOps,
        weights: WeightSource,
        max_model_len: int,
        target: TargetModel,
        token_ids: NDArray[np.int64] | None,
    ) -> None:
        """Load a head for `target`; arguments as for `HeadStates`. Raises `WeightsError`."""
        super().__init__(spec, target, token_ids)
        declared, self.spec = spec.decoder, spec
        reads = declared.reads
        assert reads is not None
        check_tensors(declared.shapes(), weights.shapes)
        parts, table = Parts(weights, ops), declared.embedding
        own: Shapes = {f"{table.name}.weight": (table.num_rows, table.size)}
        self._embedding = parts.rows(own) if declared.embeds else None
        self._norms = parts.norm(reads.embedding_norm), parts.norm(reads.hidden_norm)
        self._fc, self._projection = (
            None if each is None else parts.linear(each) for each in (reads.states, reads.projection)
        )
        self._layer = layer_parts(declared.layers[0], declared.rotations(), 0, parts)
        self._layers, self._window = NativeLayers([self._layer]), self._layer.window
        self._norm = parts.norm(declared.norm)
        product = declared.head_linear()
        self._lm_head = None if product is None else parts.linear(product)
        self._normed_residual = reads.normed_residual
        self._rotations = Rotations(decoder_tables(declared, max_model_len, weights))
        self._plan_attention = ops.plan_attention
        self._caches: CacheAddresses | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in memory."""
        held = (self._embedding, self._fc, self._projection, self._lm_head)
        norms = sum(map(norm_bytes, (*self._norms, self._norm)))
        return layer_bytes(self._layer) + norms + sum(each.num_bytes for each in held if each is not None)

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        own = [each for each in self.keep_in(caches) if isinstance(each, np.ndarray)]
        self._caches = CacheAddresses.of(own) if own else None

    def states(self, side_by_side: Array) -> Array:
        assert self._fc is not None
        return self._fc(side_by_side)

    def hidden(self, step: StepTokens, adapters: object = None) -> Array:
        """Return what the next pairs read: of MTP normalised, of EAGLE-3 not, float32 [tokens, hidden]."""
        assert step.hidden is not None
        assert self._caches is not None, "an engine that sleeps runs no step"
        if self._embedding is None:
            embedded = arrays.widened(self.target.embed(step.token_ids, step.positions))
        else:
            embedded = self._embedding.gather(step.token_ids)
        before, (embedding_norm, hidden_norm) = step.hidden, self._norms
        normed = normalized(before, hidden_norm)
        x: Array | None = np.concatenate([normalized(embedded, embedding_norm), normed], axis=1)
        if self._projection is not None:
            assert x is not None
            hidden, x = self._projection(x), None
        else:
            hidden = (normed if self._normed_residual else before).copy()
        cached = step.caches[self._window]
        plans = {self._window: self._plan_attention(cached.attention, self._window)}
        slots, rotations = {self._window: cached.slots}, self._rotations.at(step.positions)
        self._layers(hidden, plans, rotations, self._caches, slots, first_input=x)
        return hidden if self._projection is None else normalized(hidden, self._norm)

    def logits(self, hidden: Array, adapters: object = None) -> Array:
        if self.token_ids is None:
            return self.target.logits(hidden)
        assert self._lm_head is not None
        return self.of_target(self._lm_head(normalized(hidden, self._norm)))
