"""What a decoder layer of Llama's kind consists of, and what several that were made into one call can do."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Scale of the attention scores."""


class FusedLayers(Protocol):
    def __call__(
        self,
        hidden: Tensor,
        plans: Sequence[Any],
        cos: Tensor,
        sin: Tensor,
        caches: Sequence[Tensor],
        slots: Tensor,
    ) -> None:
        """Adds the layers' contributions to `hidden` [tokens, hidden] in place. `plans` and `caches`: of each layer.
        Others: `rope_and_store`'s and `paged_attention`'s.
        """
        ...
