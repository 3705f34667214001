"""Short ways to declare what several families have: products, norms, both arrangements of a layer, ALiBi's slopes."""

from __future__ import annotations

import math

from pagemill_protocol.models.declaration import (
    Activation,
    BlockSpec,
    BranchSpec,
    LayerSpec,
    LinearSpec,
    MatrixSpec,
    MLPSpec,
    NormSpec,
    ResidualSpec,
    RowGroups,
)


def linear(
    in_features: int, *parts: tuple[str, int], bias: bool = False, transposed: bool = False,
    groups: RowGroups | None = None,
) -> LinearSpec:  # fmt: skip
    """`parts`: stored names and rows; what else is said holds for each."""
    matrices = [
        MatrixSpec(name=name, rows=rows, bias=bias, transposed=transposed, groups=groups) for name, rows in parts
    ]
    return LinearSpec(in_features, tuple(matrices))


def layer_norm(name: str, size: int, eps: float, *, bias: bool = True) -> NormSpec:
    return NormSpec(name=name, size=size, eps=eps, kind="layer", bias=bias)


def plain_mlp(up: LinearSpec, down: LinearSpec, activation: Activation) -> MLPSpec:
    return MLPSpec(up=up, down=down, activation=activation, gated=False)


def sequential(name: str, *blocks: tuple[NormSpec, BlockSpec]) -> LayerSpec:
    """Each block behind its norm, added to the residual before the next one reads it."""
    branches = [BranchSpec(norm=norm, block=block) for norm, block in blocks]
    return LayerSpec(name, tuple(ResidualSpec((branch,)) for branch in branches))


def parallel(name: str, *blocks: tuple[NormSpec, BlockSpec]) -> LayerSpec:
    """All blocks read the same residual; they may have the same norm."""
    return LayerSpec(name, (ResidualSpec(tuple(BranchSpec(norm=norm, block=block) for norm, block in blocks)),))


def query_key_value_by_head(num_heads: int, head_dim: int) -> RowGroups:
    """A fused matrix whose rows are each head's queries, keys and values in turn."""
    return RowGroups(num_heads, (head_dim, head_dim, head_dim))


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """As in BLOOM and Falcon: a geometric sequence for a power of two; others take every second of the next one's."""
    power = 1 << int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return tuple(slopes)
