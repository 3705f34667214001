"""Changes to a declared decoder: how a family says in what it differs from another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pagemill_protocol.models.declaration import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    DecoderSpec,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    MLPSpec,
    NormSpec,
    ResidualSpec,
)

replace = msgspec.structs.replace


def with_attention(plain: DecoderSpec, change: Callable[[int, AttentionSpec], AttentionSpec]) -> DecoderSpec:
    """`change`: from a layer's number and its attention."""

    def block(index: int, layer: LayerSpec, block: BlockSpec) -> BlockSpec:
        return change(index, block) if isinstance(block, AttentionSpec) else block

    return _with_blocks(plain, block)


def with_mlp(plain: DecoderSpec, change: Callable[[str, MLPSpec], MLPSpec]) -> DecoderSpec:
    """`change`: from the name that a layer's tensors begin with, and its MLP."""

    def block(index: int, layer: LayerSpec, block: BlockSpec) -> BlockSpec:
        return change(layer.name, block) if isinstance(block, MLPSpec) else block

    return _with_blocks(plain, block)


def with_norms(plain: DecoderSpec, change: Callable[[NormSpec], NormSpec]) -> DecoderSpec:
    """All norms of layers, and the one before the head; not those of queries and keys."""

    def changed(norm: NormSpec | None) -> NormSpec | None:
        return None if norm is None else change(norm)

    def branch(branch: BranchSpec) -> BranchSpec:
        return replace(branch, norm=changed(branch.norm), output_norm=changed(branch.output_norm))

    layers = tuple(layer.with_branches(branch) for layer in plain.layers)
    return replace(plain, layers=layers, norm=changed(plain.norm))


def with_layer_norms(plain: DecoderSpec, *, bias: bool = True, weight_offset: float = 0.0) -> DecoderSpec:
    """Layer norms where `plain` has RMS norms."""
    return with_norms(plain, lambda norm: replace(norm, kind="layer", bias=bias, weight_offset=weight_offset))


def with_whole_norms(plain: DecoderSpec) -> DecoderSpec:
    """Norms whose stored weights hold the offset already, as converters to GGUF write them."""

    def whole(norm: NormSpec | None) -> NormSpec | None:
        return None if norm is None else replace(norm, weight_offset=0.0)

    of_heads = with_attention(
        plain,
        lambda _, spec: replace(spec, query_norm=whole(spec.query_norm), key_norm=whole(spec.key_norm)),
    )
    return with_norms(of_heads, lambda norm: replace(norm, weight_offset=0.0))


def with_stacked_rows(plain: DecoderSpec) -> DecoderSpec:
    """Matrices of all queries, then all keys, then all values, as converters to GGUF order them."""

    def stacked(_: int, spec: AttentionSpec) -> AttentionSpec:
        parts = tuple(replace(part, groups=None) for part in spec.qkv.parts)
        return replace(spec, qkv=LinearSpec(spec.qkv.in_features, parts))

    return with_attention(plain, stacked)


def changed_head(plain: DecoderSpec, **values: Any) -> HeadSpec:
    """The head of a decoder that has one, with other values."""
    assert plain.head is not None
    return replace(plain.head, **values)


def side_by_side(plain: DecoderSpec) -> DecoderSpec:
    """All blocks of a layer read the same residual through its first norm."""

    def layer(layer: LayerSpec) -> LayerSpec:
        branches = [branch for residual in layer.residuals for branch in residual.branches]
        shared = tuple(replace(branch, norm=branches[0].norm) for branch in branches)
        return LayerSpec(layer.name, (ResidualSpec(shared),))

    return replace(plain, layers=tuple(map(layer, plain.layers)))


def _with_blocks(plain: DecoderSpec, change: Callable[[int, LayerSpec, BlockSpec], BlockSpec]) -> DecoderSpec:
    layers = [
        layer.with_branches(lambda branch, i=index, each=layer: replace(branch, block=change(i, each, branch.block)))  # type: ignore[misc]
        for index, layer in enumerate(plain.layers)
    ]
    return replace(plain, layers=tuple(layers))
