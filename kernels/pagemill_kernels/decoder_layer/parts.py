"""The parts of a decoder layer that is computed in one native call with others."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    around: tuple[NativeLinear, NativeLinear] | None = None
    """What the experts, not the router and the shared one, read a product with, and what their sum is multiplied by."""


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


class StatePlaces(NamedTuple):
    """The first values of parts in rows: of the product of `inputs`, and of what is convolved."""

    mixed: int
    """In the inputs, like the next two: what is convolved, or the gates before the convolution."""
    gates: int
    """The gates behind."""
    steps: int = 0
    """The steps, or the values of a convolution between gates."""
    queries: int = 0
    keys: int = 0
    values: int = 0


class RecurrentParts(NamedTuple):
    """Loaded weights of a block that keeps a state: the gated delta rule, a state space, or without value heads a
    convolution between two gates. Its operations are those of `recurrent`."""

    inputs: NativeLinear
    output: NativeLinear
    taps: Array
    """float32 [width, channels]."""
    places: StatePlaces
    rates: NativeLinear | None = None
    """Rows: the rates of all value heads, then their steps; None: a state space's, whose steps are in `inputs`."""
    steps: tuple[NativeLinear, NativeLinear] | None = None
    """Two products behind one another: decays of each channel of keys by itself. `rates` then has no steps."""
    gates: tuple[NativeLinear, NativeLinear] | None = None
    """With `steps`, likewise: what the gates are the sigmoids of."""
    tap_bias: Array | None = None
    scales: Array | None = None
    """float32 [rows of `inputs`]: factors."""
    decays: Array | None = None
    biases: Array | None = None
    skips: Array | None = None
    gate_norm: Array | None = None
    """float32 [value_dim], or of all value heads in parts of `norm_size`."""
    num_keys: int = 0
    num_values: int = 0
    key_dim: int = 0
    value_dim: int = 0
    norm_size: int = 0
    norm_of_ranks: tuple[int, int, int] = (0, 0, 0)
    """Where ranks divide parts of the norm: the number of parts, the first head here, and the number of all heads."""
    eps: float = 0.0
    step_limits: tuple[float, float] = (0.0, math.inf)
    rate_scale: float = 1.0
    gates_first: bool = False
    norm: NormParts | None = None
    """Before the block."""
    output_norm: NormParts | None = None
    residual_scale: float = 1.0

    def matrices(self) -> Iterator[NativeLinear]:
        every = (self.inputs, self.rates, *(self.steps or ()), *(self.gates or ()), self.output)
        yield from (each for each in every if each is not None)

    def vectors(self) -> Iterator[Array]:
        """Yield the weights that are no matrices, without norms around the block."""
        every = (self.taps, self.tap_bias, self.decays, self.biases, self.skips, self.gate_norm)
        yield from (each for each in every if each is not None)


class LayerParts(NamedTuple):
    """Loaded weights of one layer; biases are in the packed linear layers.

    hidden = residual_norm(hidden + scale * output_norm(block(norm(hidden)))), for attention and then for the MLP. A
    block that keeps a state is in the place of attention, or reads the same hidden states. Without one block its
    matrices are None.
    """

    qkv: NativeLinear | LatentParts | None = None
    """Queries, keys and values, or what replaces them."""
    output: NativeLinear | None = None
    mlp: MLPParts | MoEParts | None = None
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    scale: float = 1.0
    """Scale of the attention scores."""
    attention_norm: NormParts | None = None
    mlp_norm: NormParts | None = None
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
    """Of attention."""
    mlp_scale: float = 1.0
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
    first_attention: int = 0
    """Number of the attention's first linear layer, from `first_linear` on; likewise the next one."""
    first_mlp: int = 2
    gated: bool = False
    """Whether `qkv` has gates of all query heads' values as its last rows."""
    head_gates: NativeLinear | None = None
    """One row for each query head."""
    recurrent: RecurrentParts | None = None
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
    def hidden_size(self) -> int:
        blocks = (self.output, None if self.recurrent is None else self.recurrent.output)
        found = next((each.out_features for each in blocks if each is not None), None)
        if found is not None:
            return found
        assert self.mlp is not None
        first = self.mlp.up if isinstance(self.mlp, MLPParts) else self.mlp.router
        return first.in_features

    @property
    def inputs(self) -> int:
        """Values of each token that the layer's attention reads; without one, of the hidden states."""
        if self.qkv is None:
            return self.hidden_size
        return self.qkv.inputs if isinstance(self.qkv, LatentParts) else self.qkv.in_features
