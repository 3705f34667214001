"""What one layer keeps of the tokens before, and the recurrent layers, which keep states. How layers become cache kinds
is `spec.model_spec`'s part; `declaration` has all other layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import msgspec

from pagemill_models.declaration.matrices import LinearSpec, NormSpec, Shapes, merged


class VectorsSpec(msgspec.Struct, frozen=True):
    """What a layer caches of each token: `heads` vectors of `size` values, which the last `window` tokens read."""

    heads: int
    size: int
    window: int | None = None


class StateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a recurrent layer keeps: a state at a block boundary, and the inputs of the tokens since.

    All values are float32. A convolution keeps the last `width` - 1 values of each of its channels as part of the
    state.
    """

    parts: tuple[tuple[int, ...], ...] = ()
    """Shapes of the arrays that are the state."""
    inputs_per_token: int = 0
    """Values of a token from which the state behind it is computed, without those of the convolution."""
    channels: int = 0
    width: int = 1

    @property
    def num_values(self) -> int:
        return sum(math.prod(shape) for shape in self.parts) + self.num_window_values

    @property
    def num_window_values(self) -> int:
        """Values of the convolution, which are the last ones of a state."""
        return (self.width - 1) * self.channels

    def num_row_values(self, block_size: int, most_proposed: int) -> int:
        """Return the values that a running sequence keeps of the tokens since its state: those of a block, and those
        that may be proposed. The convolution needs only its last inputs."""
        of_tokens = (block_size + most_proposed) * self.inputs_per_token
        return of_tokens + (self.width - 1 + most_proposed) * self.channels


LayerCacheSpec = VectorsSpec | StateSpec
"""What a layer keeps of the tokens before."""


class DeltaRuleSpec(msgspec.Struct, frozen=True, kw_only=True, tag="delta_rule"):
    """The gated delta rule (arXiv 2412.06464) over queries, keys and values that a short causal convolution makes.

    Value head h reads key head h // (num_value_heads / num_key_heads). With a key k of length one, a token's state
    S [key_dim, value_dim] is D + k (b (v - D^T k))^T, where D is the state before times exp(-exp(A_log) softplus(a +
    dt_bias)) and b is a sigmoid. It gives norm(S^T q / sqrt(key_dim)) * silu(gate), with a query of length one.
    """

    name: str
    """Prefix of the stored tensors `A_log` and `dt_bias` [num_value_heads], and of `convolutions`."""
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution reads."""
    inputs: LinearSpec
    """Rows: all query heads, all key heads, all value heads, which are convolved; then the gates of all value heads."""
    rates: LinearSpec
    """Rows: for each value head what b is the sigmoid of; then for each head what is added to dt_bias."""
    norm: NormSpec
    """Of each value head."""
    output: LinearSpec
    rate_scale: float = 1.0
    """Factor on b: up to 2, with which a state may also change its sign."""
    split: bool = False
    """Whether queries, keys and values each have a stored convolution."""

    @property
    def channels(self) -> int:
        return sum(self.convolutions.values())

    @property
    def convolutions(self) -> dict[str, int]:
        """The channels of each stored convolution, `weight` [channels, 1, width], by its name."""
        of_keys, of_values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return convolutions_of(self.name, of_keys, of_values, split=self.split)

    @property
    def cache(self) -> StateSpec:
        """Of each token since the state: its key, its corrected value and its decay."""
        heads = self.num_value_heads
        return StateSpec(
            parts=((heads, self.key_dim, self.value_dim),),
            inputs_per_token=self.num_key_heads * self.key_dim + heads * (self.value_dim + 1),
            channels=self.channels,
            width=self.width,
        )

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.inputs, self.rates, self.output)

    def shapes(self) -> Shapes:
        heads = (self.num_value_heads,)
        own: Shapes = {f"{self.name}.A_log": heads, f"{self.name}.dt_bias": heads}
        return merged(*self.linears(), self.norm) | own | kernels(self.convolutions, self.width)


class ChannelDeltaRuleSpec(msgspec.Struct, frozen=True, kw_only=True, tag="channel_delta_rule"):
    """The delta rule with a decay for each channel of keys, as in Kimi Linear (arXiv 2510.26692).

    It is `DeltaRuleSpec` with as many key heads as value heads, where D is the state before with row k times
    exp(-exp(A_log) softplus(decay_up(decay_down(x)) + dt_bias)), and with gates gate_up(gate_down(x)), whose sigmoid is
    multiplied in.
    """

    name: str
    """Prefix of the stored `convolutions`."""
    decay_name: str
    """Prefix of the stored tensors `A_log` [1, 1, num_value_heads, 1] and `dt_bias` [num_value_heads * key_dim]."""
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution reads."""
    inputs: LinearSpec
    """Rows: all queries, all keys, all values, which are convolved."""
    rates: LinearSpec
    """Rows: for each head what b is the sigmoid of."""
    decay_down: LinearSpec
    decay_up: LinearSpec
    gate_down: LinearSpec
    gate_up: LinearSpec
    norm: NormSpec
    """Of each head."""
    output: LinearSpec

    @property
    def channels(self) -> int:
        return sum(self.convolutions.values())

    @property
    def convolutions(self) -> dict[str, int]:
        """As those of `DeltaRuleSpec`."""
        heads = self.num_value_heads
        return convolutions_of(self.name, heads * self.key_dim, heads * self.value_dim, split=True)

    @property
    def cache(self) -> StateSpec:
        """Of each token since the state: its key, its corrected value and its decays."""
        heads = self.num_value_heads
        return StateSpec(
            parts=((heads, self.key_dim, self.value_dim),),
            inputs_per_token=heads * (2 * self.key_dim + self.value_dim),
            channels=self.channels,
            width=self.width,
        )

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.inputs, self.rates, self.decay_down, self.decay_up, self.gate_down, self.gate_up, self.output)

    def shapes(self) -> Shapes:
        heads = self.num_value_heads
        own: Shapes = {
            f"{self.decay_name}.A_log": (1, 1, heads, 1),
            f"{self.decay_name}.dt_bias": (heads * self.key_dim,),
        }
        return merged(*self.linears(), self.norm) | own | kernels(self.convolutions, self.width)


def convolutions_of(name: str, of_keys: int, of_values: int, *, split: bool) -> dict[str, int]:
    """Return the channels of a delta rule's stored convolutions by their names."""
    if not split:
        return {f"{name}.conv1d": 2 * of_keys + of_values}
    return {f"{name}.q_conv1d": of_keys, f"{name}.k_conv1d": of_keys, f"{name}.v_conv1d": of_values}


def kernels(convolutions: dict[str, int], width: int) -> Shapes:
    return {f"{name}.weight": (channels, 1, width) for name, channels in convolutions.items()}


class StateSpaceSpec(msgspec.Struct, frozen=True, kw_only=True, tag="state_space"):
    """Mamba 2's state space (arXiv 2405.21060) over values, B and C that a short causal convolution makes.

    Head h reads the B and C of group h // (num_value_heads / num_groups). With a step d = softplus(s + dt_bias), a
    token's state S [state_size, head_dim] is exp(-exp(A_log) d) times the one before, plus B (d x)^T for its value x.
    It gives S^T C + D x, gated by silu and normalised.
    """

    name: str
    """Prefix of the stored tensors `conv1d.weight` [channels, 1, width], perhaps `conv1d.bias` [channels], and `A_log`,
    `D` and `dt_bias` [num_value_heads]."""
    num_groups: int
    num_value_heads: int
    head_dim: int
    state_size: int
    width: int
    """Tokens that the convolution reads."""
    bias: bool
    """Whether the convolution has one."""
    inputs: LinearSpec
    """Rows: the gates of all heads; their values, the B of all groups and their C, which are convolved; the s of all
    heads."""
    output: LinearSpec
    norm: NormSpec | None
    """Over all heads' values, those of a group by themselves. None: outputs are only gated."""
    norm_parts: int
    """Number of parts of equal size that the norm treats by themselves."""
    norm_heads: tuple[int, int] | None = None
    """Set if ranks divide these parts and add their squares: the first head here, and the number of all ranks'."""
    gates_first: bool = True
    """Whether gates are multiplied in before the norm."""
    step_limits: tuple[float, float] = (0.0, math.inf)
    """Bounds of d."""
    scales: tuple[float, float, float, float, float] | None = None
    """Factors on the gates, values, B, C and s that `inputs` gives."""

    @property
    def channels(self) -> int:
        return self.num_value_heads * self.head_dim + 2 * self.num_groups * self.state_size

    @property
    def cache(self) -> StateSpec:
        """Of each token since the state: its B, its values times d, and its decays."""
        heads = self.num_value_heads
        return StateSpec(
            parts=((heads, self.state_size, self.head_dim),),
            inputs_per_token=self.num_groups * self.state_size + heads * (self.head_dim + 1),
            channels=self.channels,
            width=self.width,
        )

    @property
    def input_sizes(self) -> tuple[int, int, int, int, int]:
        """Rows of `inputs` by part, in the order of `scales`."""
        of_heads, of_groups = self.num_value_heads * self.head_dim, self.num_groups * self.state_size
        return of_heads, of_heads, of_groups, of_groups, self.num_value_heads

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.inputs, self.output)

    def shapes(self) -> Shapes:
        heads = (self.num_value_heads,)
        own: Shapes = {"conv1d.weight": (self.channels, 1, self.width), "A_log": heads, "D": heads, "dt_bias": heads}
        own |= {"conv1d.bias": (self.channels,)} if self.bias else {}
        return merged(*self.linears(), self.norm) | {f"{self.name}.{part}": shape for part, shape in own.items()}


class ShortConvolutionSpec(msgspec.Struct, frozen=True, kw_only=True, tag="short_convolution"):
    """A causal convolution of each channel between two gates: output(behind * convolution(before * values)), as in
    LFM2."""

    name: str
    """Stored as `name`.weight [channels, 1, width], and `name`.bias [channels]."""
    channels: int
    width: int
    """Tokens that it reads."""
    bias: bool
    inputs: LinearSpec
    """Rows: the gates before, the gates behind, the values."""
    output: LinearSpec

    num_value_heads: ClassVar[int] = 0

    @property
    def cache(self) -> StateSpec:
        return StateSpec(channels=self.channels, width=self.width)

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.inputs, self.output)

    def shapes(self) -> Shapes:
        bias: Shapes = {f"{self.name}.bias": (self.channels,)} if self.bias else {}
        return merged(*self.linears()) | {f"{self.name}.weight": (self.channels, 1, self.width)} | bias


RecurrentSpec = DeltaRuleSpec | ChannelDeltaRuleSpec | StateSpaceSpec | ShortConvolutionSpec
"""A layer that keeps a state."""
