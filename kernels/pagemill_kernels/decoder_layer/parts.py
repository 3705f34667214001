"""The parts of a decoder layer that is computed in one native call with others."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pagemill_kernels.arrays import Array
from pagemill_kernels.experts.native import NativeExperts
from pagemill_kernels.experts.parts import Gating
from pagemill_kernels.linear.native import NativeLinear

KeySource = Literal["own", "keys", "another"]
"""Where a layer's values come from, by the kernels' numbers."""


class NormParts(NamedTuple):
    """RMS norm, or layer norm if `centered`."""

    weight: Array
    """[size], or [heads, size] where each head has its own."""
    bias: Array | None
    eps: float
    centered: bool
    whole_size: int = 0
    """Number of values of all ranks, where they divide those of the norm; else 0."""
    adds: bool = True
    """Whether this rank's values count in the ranks' sum of squares."""


class MLPParts(NamedTuple):
    up: NativeLinear
    """If gated, the gate's rows followed by the up projection's."""
    down: NativeLinear
    activation: str
    gated: bool
    limit: float | None
    """The argument of `activation.reference.activate_and_mul`."""


class SharedExpertParts(NamedTuple):
    mlp: MLPParts
    gate: NativeLinear | None
    """One row: the MLP's outputs are multiplied by the sigmoid of this product."""


class MoEParts(NamedTuple):
    router: NativeLinear
    experts: NativeExperts
    top_k: int
    renormalized: bool
    """The argument of `experts.reference.route`."""
    gating: Gating | None = None
    """None: experts are chosen by the softmax of the router's logits."""
    choice_bias: Array | None = None
    """float32 [experts], for a gating."""
    shared: SharedExpertParts | None = None
    norm: NormParts | None = None
    """Of the experts' inputs."""
    router_norm: NormParts | None = None
    scales: Array | None = None
    """float32 [experts]: factors of the weights."""
    output_norm: NormParts | None = None
    """Of experts beside an MLP."""


class InputMLPParts(NamedTuple):
    """An MLP whose inner values are multiplied by inputs of the layer."""

    mlp: MLPParts
    first_input: int
    output_norm: NormParts | None


class LatentParts(NamedTuple):
    """Attention over latents, which replaces `qkv`; the fields are those of `LatentAttentionSpec`."""

    query_down: NativeLinear | None
    query_norm: NormParts | None
    query: NativeLinear
    down: NativeLinear
    latent_norm: NormParts
    keys: tuple[NativeLinear, ...]
    """Of each head, [latent_size, key_dim]: from a query to a latent with the same scores."""
    values: tuple[NativeLinear, ...]
    """Of each head, [value_dim, latent_size]."""
    shared_size: int

    @property
    def inputs(self) -> int:
        return (self.query if self.query_down is None else self.query_down).in_features

    @property
    def matrices(self) -> tuple[NativeLinear, ...]:
        first = () if self.query_down is None else (self.query_down,)
        return (*first, self.query, self.down, *self.keys, *self.values)


class LayerParts(NamedTuple):
    """Loaded weights of one layer; biases are in the packed linear layers.

    hidden = residual_norm(hidden + residual_scale * output_norm(block(norm(hidden)))), for attention and then for the
    MLP.
    """

    qkv: NativeLinear | LatentParts
    """Queries, keys and values, or what replaces them."""
    output: NativeLinear
    mlp: MLPParts | MoEParts
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scale of the attention scores."""
    attention_norm: NormParts | None
    mlp_norm: NormParts | None
    """None in a parallel layer whose MLP has the attention's input."""
    query_norm: NormParts | None = None
    """Norm around the rotation, of head_dim for each head alone, or of all heads' size over all of them."""
    key_norm: NormParts | None = None
    norms_behind_rotation: bool = False
    query_growth: bool = False
    """Whether queries are multiplied by the step's factors, behind the rotation."""
    clip: float | None = None
    """Bound of the amounts of queries, keys and values before the rotation."""
    attention_output_norm: NormParts | None = None
    mlp_output_norm: NormParts | None = None
    residual_scale: float = 1.0
    parallel: bool = False
    """Whether the MLP reads the hidden states that the attention reads."""
    window: int | None = None
    """Sliding window of the attention; None: full attention."""
    rotation: int | None = None
    """Index of the rotary embedding, among the model's, of queries and keys; None: they are not rotated."""
    sinks: Array | None = None
    """float32 [num_heads]."""
    alibi_slopes: Array | None = None
    """float32 [num_heads]."""
    soft_cap: float | None = None
    """Of the attention scores."""
    first_linear: int = 0
    """Number of the layer's first linear layer, for adapters."""
    key_source: KeySource = "own"
    """`keys`: values are keys before these are normalised and rotated. `another`: keys and values are another
    layer's."""
    value_norm: NormParts | None = None
    """Of each head."""
    ahead: bool = False
    """Whether tokens attend as far ahead as back."""
    attention_residual_norm: NormParts | None = None
    mlp_residual_norm: NormParts | None = None
    beside: MoEParts | None = None
    """Experts that read what the MLP reads."""
    sum_norm: NormParts | None = None
    """Of the sum of MLP and experts."""
    input_mlp: InputMLPParts | None = None
    factor: Array | None = None
    """float32 [1], of the hidden states behind the layer."""

    @property
    def inputs(self) -> int:
        """Values of each token that the attention reads."""
        return self.qkv.inputs if isinstance(self.qkv, LatentParts) else self.qkv.in_features
