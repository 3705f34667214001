"""A classifier without torch: `models.classifier` over packed matrices and arrays. It is small and runs once per
prompt."""

from __future__ import annotations

import numpy as np

from pagemill_engine.native.parts import Parts, norm_bytes, normalized
from pagemill_kernels.activation import native as activation
from pagemill_kernels.arrays import Array
from pagemill_protocol.models.declaration import ClassifierSpec, DenseSpec


class NativeClassifier:
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
