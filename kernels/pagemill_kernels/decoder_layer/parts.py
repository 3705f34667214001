"""What a decoder layer of Llama's kind consists of, and what one that was made into a single call can do."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pagemill_kernels.linear.packed import PackedLinear


class LayerParts(NamedTuple):
    """Loaded weights; biases are the packed layers' own."""

    attention_norm: Tensor
    qkv: PackedLinear
    query_norm: Tensor | None
    """[head_dim]; with `key_norm` where heads are normalised before they are rotated."""
    key_norm: Tensor | None
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    """Of the scores."""


class FusedLayer(Protocol):
    def __call__(self, hidden: Tensor, plan: Any, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Adds the layer's contribution to `hidden` [tokens, hidden] in place. Others: `rope_and_store`'s and
        `paged_attention`'s."""
        ...
