"""The basic parts of a declaration: stored matrices, linear layers made of them, norms, rotations, activations, tables.

`declaration` has what is made of them, `caches` the recurrent layers. Matrices are [outputs, inputs]; tensors have the
names of Hugging Face checkpoints.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from pagemill_models.declaration.rope_scaling import RopeScaling

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"]
"""`gelu`: with erf; `gelu_tanh`: its approximation by tanh (`gelu_new`, `gelu_pytorch_tanh`); `gelu_quick`:
x * sigmoid(1.702 x); `relu2`: the square of ReLU."""


class RowGroups(msgspec.Struct, frozen=True):
    """An order of rows: `count` consecutive groups, each of `sizes[0]` rows, then `sizes[1]` rows, and so on.

    An executor needs all rows of the first size, then all of the second. GPT-NeoX's `query_key_value` has a group for
    each head, of head_dim queries, keys and values.
    """

    count: int
    sizes: tuple[int, ...]


class MatrixSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A stored matrix `name`.weight [rows, inputs], with or without a bias [rows]."""

    name: str
    rows: int
    bias: bool = False
    """Whether it has a bias: `name`.bias, or `bias_name`."""
    bias_name: str = ""
    transposed: bool = False
    """Whether it is stored as [inputs, rows], as GPT-2's Conv1D."""
    groups: RowGroups | None = None
    """The stored order of its rows, if it differs from the required order."""

    @property
    def stored_bias(self) -> str:
        return self.bias_name or f"{self.name}.bias"


class LinearSpec(msgspec.Struct, frozen=True):
    """y = x W^T + b, where W consists of stacked `parts`."""

    in_features: int
    parts: tuple[MatrixSpec, ...]
    trained_groups: RowGroups | None = None
    """The order of all rows in the models that trainers of adapters have, if the files have another."""

    @property
    def out_features(self) -> int:
        return sum(part.rows for part in self.parts)

    def weight_shapes(self) -> Shapes:
        return {f"{part.name}.weight": (part.rows, self.in_features) for part in self.parts}

    def shapes(self) -> Shapes:
        biases: Shapes = {part.stored_bias: (part.rows,) for part in self.parts if part.bias}
        return self.weight_shapes() | biases


class NormPart(msgspec.Struct, frozen=True):
    """A norm whose values are divided among ranks, which add their sums of squares."""

    whole_size: int
    """Number of values of all ranks."""
    adds: bool
    """Whether this rank's values count; of ranks with the same ones only the first adds them."""


class NormSpec(msgspec.Struct, frozen=True, kw_only=True):
    """RMS norm or layer norm over `size` values, with `name`.weight and perhaps `name`.bias."""

    name: str
    size: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False
    stored: str | None = "weight"
    """Last part of the weight's name; None: nothing is stored, and values are only normalised."""
    weight_offset: float = 0.0
    """Number added to the stored weight: 1 in Gemma."""
    factor: float = 1.0
    """Factor on the stored weight."""
    part: NormPart | None = None
    """Set if other ranks have further values of the same norm."""
    heads: tuple[int, int] | None = None
    """Heads (the first, and that behind the last) that have weights of their own: rows of one tensor, or tensors with
    `{head}` in `stored`. None: every row of `size` values has the same weights."""

    def weight_shapes(self) -> Shapes:
        if self.stored is None:
            return {}
        name = f"{self.name}.{self.stored}"
        if self.heads is None:
            return {name: (self.size,)}
        if "{head}" in name:
            return {name.format(head=head): (self.size,) for head in range(*self.heads)}
        return {name: (self.heads[1] - self.heads[0], self.size)}

    def shapes(self) -> Shapes:
        return self.weight_shapes() | ({f"{self.name}.bias": (self.size,)} if self.bias else {})


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding (arXiv 2104.09864) of the first `rotary_dim` values of each query and key head."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    """`None`: plain rotary embedding."""
    interleaved: bool = False
    """Whether neighbouring values form a pair, as in GPT-J; otherwise value i is paired with value i + rotary_dim
    / 2."""
    divisors: str | None = None
    """Name of a stored tensor [rotary_dim / 2] that divides the frequencies, in place of `scaling`."""

    def shapes(self) -> Shapes:
        return {} if self.divisors is None else {self.divisors: (self.rotary_dim // 2,)}


class QueryGrowth(msgspec.Struct, frozen=True):
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / length)), behind the rotation."""

    beta: float
    length: int


class PositionsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A learned vector per position, added to the embedding: row position + offset of `name`.weight."""

    name: str
    num_rows: int
    offset: int = 0


class TokenTypesSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A learned vector per text of a pair, added to the embedding: row 0 or 1 of `name`.weight."""

    name: str
    num_rows: int


class HasShapes(Protocol):
    def shapes(self) -> Shapes: ...


def merged(*parts: HasShapes | None) -> Shapes:
    """Return the shapes of all parts that are there."""
    shapes: Shapes = {}
    for part in parts:
        shapes |= {} if part is None else part.shapes()
    return shapes


class GatingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Routing of DeepSeek: each token is routed to its `top_groups` best groups, then to the best experts of these."""

    scores: Literal["softmax", "sigmoid"]
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    """Number of best experts whose scores are summed as a group's score."""
    bias: str | None = None
    """Name of a stored tensor [experts] that is added to the scores for the choice, not for the weights."""
    scale: float = 1.0
    """Factor on the weights."""
