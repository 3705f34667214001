"""What a decoder layer consists of that is computed in one native call with others."""

from __future__ import annotations

from typing import NamedTuple

from pagemill_kernels.arrays import Array
from pagemill_kernels.experts.native import NativeExperts
from pagemill_kernels.linear.native import NativeLinear


class NormParts(NamedTuple):
    """RMS norm, or layer norm where it is centered."""

    weight: Array
    bias: Array | None
    eps: float
    centered: bool


class MLPParts(NamedTuple):
    up: NativeLinear
    """Where it is gated the gate's rows, then the up projection's."""
    down: NativeLinear
    activation: str
    gated: bool
    limit: float | None
    """As in `activation.reference.activate_and_mul`."""


class MoEParts(NamedTuple):
    router: NativeLinear
    experts: NativeExperts
    top_k: int
    renormalized: bool
    """As in `experts.reference.route`."""


class LayerParts(NamedTuple):
    """Loaded weights; biases are the packed layers' own.

    hidden += residual_scale * output_norm(block(norm(hidden))), for attention and then for the MLP.
    """

    qkv: NativeLinear
    output: NativeLinear
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
    window: int | None = None
    """Of the attention; `None`: all that comes before."""
    rotation: int | None = None
    """Which of the model's rotary embeddings turns queries and keys; `None`: nothing does."""
    sinks: Array | None = None
    """float32 [num_heads]."""
