"""What a decoder layer consists of, and what several that were made into one call can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pagemill_kernels.experts.parts import FusedExperts
from pagemill_kernels.linear.packed import PackedLinear


class NormParts(NamedTuple):
    """RMS norm, or layer norm where it is centered."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool


class MLPParts(NamedTuple):
    up: PackedLinear
    """Where it is gated the gate's rows, then the up projection's."""
    down: PackedLinear
    activation: str
    gated: bool
    limit: float | None
    """As in `activation.reference.activate_and_mul`."""


class MoEParts(NamedTuple):
    router: PackedLinear
    experts: FusedExperts
    top_k: int
    renormalized: bool
    """As in `experts.reference.route`."""


class LayerParts(NamedTuple):
    """Loaded weights; biases are the packed layers' own.

    hidden += residual_scale * output_norm(block(norm(hidden))), for attention and then for the MLP.
    """

    qkv: PackedLinear
    output: PackedLinear
    mlp: MLPParts | MoEParts
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scale of the attention scores."""
    attention_norm: NormParts | None
    mlp_norm: NormParts | None
    """`None` in a parallel layer: the input of the attention is that of the MLP too."""
    query_norm: NormParts | None = None
    """Of head_dim for each head alone, of all heads' size over all of them; before they are rotated."""
    key_norm: NormParts | None = None
    attention_output_norm: NormParts | None = None
    mlp_output_norm: NormParts | None = None
    residual_scale: float = 1.0
    parallel: bool = False
    """The MLP reads the hidden states that the attention reads."""
    sinks: Tensor | None = None
    """float32 [num_heads]."""


class FusedLayers(Protocol):
    def __call__(
        self,
        hidden: Tensor,
        plans: Sequence[Any],
        rotations: Sequence[tuple[Tensor, Tensor] | None],
        caches: Sequence[Tensor],
        slots: Tensor,
    ) -> None:
        """Adds the layers' contributions to `hidden` [tokens, hidden] in place. `plans`, `rotations` (cos and sin, or
        `None` where nothing turns) and `caches`: of each layer. Others: `rope_and_store`'s and `paged_attention`'s.
        """
        ...
