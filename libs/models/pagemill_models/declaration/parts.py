"""Helpers to declare common parts: matmuls, norms, both arrangements of a layer, ALiBi's slopes."""

from __future__ import annotations

import math
from functools import lru_cache

from pagemill_models.declaration.declaration import (
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
from pagemill_models.declaration.errors import Contradiction


def head_size(size: int, num_heads: int) -> int:
    """Return the values of a head where the settings declare none. Raises `Contradiction`."""
    if num_heads > size:
        raise Contradiction(f"{num_heads} attention heads are more than the {size} values of its hidden_size")
    return size // num_heads


def linear(
    in_features: int, *parts: tuple[str, int], bias: bool = False, transposed: bool = False,
    groups: RowGroups | None = None,
) -> LinearSpec:  # fmt: skip
    """Declare a matmul. `parts`: stored names and rows; the other arguments apply to each part."""
    matrices = [
        MatrixSpec(name=name, rows=rows, bias=bias, transposed=transposed, groups=groups) for name, rows in parts
    ]
    return LinearSpec(in_features, tuple(matrices))


def layer_norm(name: str, size: int, eps: float, *, bias: bool = True) -> NormSpec:
    return NormSpec(name=name, size=size, eps=eps, kind="layer", bias=bias)


def plain_mlp(up: LinearSpec, down: LinearSpec, activation: Activation) -> MLPSpec:
    return MLPSpec(up=up, down=down, activation=activation, gated=False)


def sequential(name: str, *blocks: tuple[NormSpec, BlockSpec]) -> LayerSpec:
    """Declare a layer whose blocks, each after its norm, are added to the residual one after another."""
    branches = [BranchSpec(norm=norm, block=block) for norm, block in blocks]
    return LayerSpec(name, tuple(ResidualSpec((branch,)) for branch in branches))


def parallel(name: str, *blocks: tuple[NormSpec, BlockSpec]) -> LayerSpec:
    """Declare a layer whose blocks all read the same residual; they may share a norm."""
    return LayerSpec(name, (ResidualSpec(tuple(BranchSpec(norm=norm, block=block) for norm, block in blocks)),))


def query_key_value_by_head(num_heads: int, head_dim: int) -> RowGroups:
    """Return the order of a fused matrix with each head's queries, keys and values in turn."""
    return RowGroups(num_heads, (head_dim, head_dim, head_dim))


@lru_cache
def alibi_slopes(num_heads: int, factor: float = 1.0) -> tuple[float, ...]:
    """Return slopes as in BLOOM and Falcon, times `factor`: a geometric sequence for a power of two.

    Other numbers of heads take every second slope of the next power for the rest. All layers share the tuple.
    """
    power = 1 << int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return tuple(slope * factor for slope in slopes)
