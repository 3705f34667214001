"""A classifier over the pooled hidden state of each prompt: matmuls with activations and norms between them.

It is small and runs once per prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pagemill_engine.models.layers import Layer, Linear, Norm
from pagemill_kernels.registry import Ops
from pagemill_protocol.models.declaration import ClassifierSpec, DenseSpec


class _Dense:
    def __init__(self, spec: DenseSpec, ops: Ops, dtype: torch.dtype) -> None:
        self.linear = Linear(spec.linear, ops, dtype)
        self.norm = None if spec.norm is None else Norm(spec.norm, ops, dtype)
        self._activate = _activation(spec, ops)

    def layers(self) -> Iterator[Layer]:
        yield self.linear
        if self.norm is not None:
            yield self.norm

    def __call__(self, x: Tensor) -> Tensor:
        x = self._activate(self.linear(x))
        return x if self.norm is None else self.norm(x)


class Classifier:
    def __init__(self, spec: ClassifierSpec, ops: Ops, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._dense = [_Dense(layer, ops, dtype) for layer in spec.layers]

    def layers(self) -> Iterator[Layer]:
        for dense in self._dense:
            yield from dense.layers()

    def __call__(self, pooled: Tensor) -> Tensor:
        """Classify prompts. pooled: [prompts, hidden]. Returns float32 [prompts, labels]."""
        x = pooled.to(self._dtype)
        for dense in self._dense:
            x = dense(x).to(self._dtype)
        return x.float()


def _activation(spec: DenseSpec, ops: Ops) -> Callable[[Tensor], Tensor]:
    kind = spec.activation
    if kind is None:
        return lambda x: x
    if kind == "tanh":
        return torch.tanh
    return lambda x: ops.activate(x, kind)
