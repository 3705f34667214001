"""A whole decoder on the CPU without torch, over numpy arrays; all layers are one native call.

It is built from its declaration and filled from named tensors; a `models.step_model.StepModel`. Arithmetic is float32
and bitwise equal to that of `decoders.on_torch.decoder` over the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagemill_engine.decoders.fitting import check_tensors
from pagemill_engine.decoders.native.layers import layer_bytes, layer_parts
from pagemill_engine.decoders.native.parts import Ids, Parts, Rows, norm_bytes, normalized
from pagemill_engine.decoders.rope import Rotations
from pagemill_engine.decoders.step_model import StepTokens
from pagemill_engine.decoders.tensors import TensorSource, read_tensor
from pagemill_kernels.activation import native as activation
from pagemill_kernels.arrays import Array
from pagemill_kernels.decoder_layer.native import CacheAddresses, NativeLayers
from pagemill_kernels.linear.native import NativeLinear
from pagemill_kernels.native_ops import NativeOps
from pagemill_models.declaration.declaration import ClassifierSpec, DenseSpec, EmbeddingSpec, HeadSpec, LinearSpec
from pagemill_models.spec.model_spec import ModelSpec


class NativeDecoder:
    def __init__(self, spec: ModelSpec, ops: NativeOps, source: TensorSource, rotations: Rotations) -> None:
        """Build the decoder and load its weights. Raises `WeightsError` for tensors that do not fit."""
        declared = spec.decoder
        check_tensors(declared.shapes(), source.shapes)
        parts = Parts(source, ops)
        self.spec = spec
        self._rotations = rotations
        self._plan_attention = ops.plan_attention
        self._windows = declared.windows()
        # In the order of the files, the last of which may still be being fetched; a tied head has the embedding's
        # matrix.
        tied = _Head(declared.head, declared.head_linear(), parts) if declared.head and declared.head.tied else None
        lent = None if tied is None else tied.product
        self.embedding = _Embedding(declared.embedding, declared.hidden_size, parts, lent)
        self.layers = [layer_parts(layer, declared.ropes(), parts) for layer in declared.layers]
        self.norm = parts.norm(declared.norm)
        self.head = tied or (None if declared.head is None else _Head(declared.head, declared.head_linear(), parts))
        self.classifier = None if declared.classifier is None else NativeClassifier(declared.classifier, parts)
        self._fused = NativeLayers(self.layers)
        self._caches: CacheAddresses | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in memory; a matrix shared by head and embedding counts once."""
        held = sum(map(layer_bytes, self.layers)) + norm_bytes(self.norm) + self.embedding.num_bytes
        held += 0 if self.head is None else self.head.num_bytes
        return held + (0 if self.classifier is None else self.classifier.num_bytes)

    def use_caches(self, caches: Sequence[Array]) -> None:
        self._caches = CacheAddresses.of(caches) if caches else None

    def hidden(self, step: StepTokens) -> Array:
        """Return normalised hidden states, float32 [tokens, hidden]."""
        assert self._caches is not None, "an engine that sleeps runs no step"
        hidden = self.embedding(step.token_ids, step.positions)
        plans = {window: self._plan_attention(step.attention, window) for window in self._windows}
        self._fused(hidden, plans, self._rotations.at(step.positions), self._caches, step.slots)
        return normalized(hidden, self.norm)

    def logits(self, hidden: Array) -> Array:
        """Return the logits of hidden states, float32 [rows, vocab]."""
        assert self.head is not None, "requests for tokens of a model without a head are refused"
        return self.head(hidden)


class _Embedding:
    """Computes the first hidden states from token ids."""

    def __init__(self, spec: EmbeddingSpec, hidden_size: int, parts: Parts, lent: Rows | None) -> None:
        """Build the embedding. `lent`: the head's matrix, if the embedding shares it."""
        self._spec = spec
        self._is_shared = lent is not None
        self.rows = parts.rows({f"{spec.name}.weight": (spec.num_rows, spec.size)}) if lent is None else lent
        self._projection = None if spec.projection is None else parts.linear(spec.projection)
        self._positions: Array | None = None
        if spec.positions is not None:
            shape = (spec.positions.num_rows, hidden_size)
            self._positions = read_tensor(parts.source, f"{spec.positions.name}.weight", shape, "float32")
        self._norm = parts.norm(spec.norm)

    @property
    def num_bytes(self) -> int:
        held = 0 if self._is_shared else self.rows.num_bytes
        held += 0 if self._projection is None else self._projection.num_bytes
        held += 0 if self._positions is None else self._positions.nbytes
        return held + norm_bytes(self._norm)

    def __call__(self, token_ids: Ids, positions: Ids) -> Array:
        hidden = self.rows.gather(token_ids)
        if self._spec.scale != 1.0:
            hidden *= np.float32(self._spec.scale)
        if self._projection is not None:
            hidden = self._projection(hidden)
        if self._positions is not None:
            assert self._spec.positions is not None
            hidden += self._positions[positions + self._spec.positions.offset]
        return normalized(hidden, self._norm)


class _Head:
    """Computes logits from hidden states."""

    def __init__(self, spec: HeadSpec, linear: LinearSpec | None, parts: Parts) -> None:
        assert linear is not None
        self.spec = spec
        self.product: NativeLinear = parts.linear(linear)
        self._projection = None if spec.projection is None else parts.linear(spec.projection)

    @property
    def num_bytes(self) -> int:
        return self.product.num_bytes + (0 if self._projection is None else self._projection.num_bytes)

    def __call__(self, hidden: Array) -> Array:
        hidden = hidden if self._projection is None else self._projection(hidden)
        logits, cap = self.product(hidden), self.spec.soft_cap
        if self.spec.scale != 1.0:
            logits *= np.float32(self.spec.scale)
        if cap is not None:
            logits /= np.float32(cap)
            np.tanh(logits, out=logits)
            logits *= np.float32(cap)
        return logits


class NativeClassifier:
    """`models.decoder.Classifier` over packed matrices and arrays, without torch."""

    def __init__(self, spec: ClassifierSpec, parts: Parts) -> None:
        self._dense = [_Dense(layer, parts) for layer in spec.layers]

    @property
    def num_bytes(self) -> int:
        return sum(dense.num_bytes for dense in self._dense)

    def __call__(self, pooled: Array) -> Array:
        """Classify prompts. `pooled`: float32 [prompts, hidden]. Returns float32 [prompts, labels]."""
        for dense in self._dense:
            pooled = dense(pooled)
        return pooled


class _Dense:
    def __init__(self, spec: DenseSpec, parts: Parts) -> None:
        self._linear = parts.linear(spec.linear)
        self._norm = parts.norm(spec.norm)
        self._activation = spec.activation

    @property
    def num_bytes(self) -> int:
        return self._linear.num_bytes + norm_bytes(self._norm)

    def __call__(self, x: Array) -> Array:
        x = self._linear(x)
        if self._activation == "tanh":
            x = np.tanh(x)
        elif self._activation is not None:
            x = activation.activate(x, self._activation)
        return normalized(x, self._norm)
