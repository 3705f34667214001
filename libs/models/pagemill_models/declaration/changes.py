"""Changes to a declared decoder, by which a family declares its differences from another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pagemill_models.declaration.declaration import (
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
    """Return the decoder with changed attention. `change`: takes a layer's index and its attention."""

    def block(index: int, layer: LayerSpec, block: BlockSpec) -> BlockSpec:
        return change(index, block) if isinstance(block, AttentionSpec) else block

    return _with_blocks(plain, block)


def with_head_norms(
    plain: DecoderSpec, names: tuple[str, str], eps: float, *, bias: bool = False, stored: str = "weight",
    of_each_head: bool = False,
) -> DecoderSpec:  # fmt: skip
    """Return the decoder with layer norms over each query and each key head. `names`: those of the two norms."""

    def attention(index: int, spec: AttentionSpec) -> AttentionSpec:
        norms = [
            NormSpec(
                name=f"{plain.layers[index].name}.self_attn.{name}",
                size=spec.head_dim,
                eps=eps,
                kind="layer",
                bias=bias,
                stored=stored,
                heads=(0, count) if of_each_head else None,
            )
            for name, count in zip(names, (spec.num_heads, spec.num_kv_heads), strict=True)
        ]
        return replace(spec, query_norm=norms[0], key_norm=norms[1])

    return with_attention(plain, attention)


def with_mlp(plain: DecoderSpec, change: Callable[[str, MLPSpec], MLPSpec]) -> DecoderSpec:
    """Return the decoder with changed MLPs. `change`: takes the prefix of a layer's tensors and its MLP."""

    def block(index: int, layer: LayerSpec, block: BlockSpec) -> BlockSpec:
        return change(layer.name, block) if isinstance(block, MLPSpec) else block

    return _with_blocks(plain, block)


def with_norms(plain: DecoderSpec, change: Callable[[NormSpec], NormSpec]) -> DecoderSpec:
    """Return the decoder with changed norms: those of layers and of the head, not those of queries and keys."""

    def changed(norm: NormSpec | None) -> NormSpec | None:
        return None if norm is None else change(norm)

    def branch(branch: BranchSpec) -> BranchSpec:
        return replace(branch, norm=changed(branch.norm), output_norm=changed(branch.output_norm))

    layers = tuple(layer.with_branches(branch) for layer in plain.layers)
    return replace(plain, layers=layers, norm=changed(plain.norm))


def with_layer_norms(plain: DecoderSpec, *, bias: bool = True, weight_offset: float = 0.0) -> DecoderSpec:
    """Return `plain` with layer norms in place of RMS norms."""
    return with_norms(plain, lambda norm: replace(norm, kind="layer", bias=bias, weight_offset=weight_offset))


def with_whole_norms(plain: DecoderSpec) -> DecoderSpec:
    """Return the decoder with norms whose stored weights include the offset, as converters to GGUF write them."""

    def whole(norm: NormSpec | None) -> NormSpec | None:
        return None if norm is None else replace(norm, weight_offset=0.0)

    of_heads = with_attention(
        plain,
        lambda _, spec: replace(spec, query_norm=whole(spec.query_norm), key_norm=whole(spec.key_norm)),
    )
    return with_norms(of_heads, lambda norm: replace(norm, weight_offset=0.0))


def with_stacked_rows(plain: DecoderSpec) -> DecoderSpec:
    """Return the decoder with matrices of all queries, then all keys, then all values, as in GGUF files."""

    def stacked(_: int, spec: AttentionSpec) -> AttentionSpec:
        (part,) = spec.qkv.parts
        qkv = LinearSpec(spec.qkv.in_features, (replace(part, groups=None),), trained_groups=part.groups)
        return replace(spec, qkv=qkv)

    return with_attention(plain, stacked)


def with_output_norms(plain: DecoderSpec, *names: str) -> DecoderSpec:
    """Return `plain`, whose layers have a norm before each block, with a further one of these names behind each."""

    def layer(layer: LayerSpec) -> LayerSpec:
        after = iter(names)

        def branch(each: BranchSpec) -> BranchSpec:
            assert each.norm is not None
            return replace(each, output_norm=replace(each.norm, name=f"{layer.name}.{next(after)}"))

        return layer.with_branches(branch)

    return replace(plain, layers=tuple(map(layer, plain.layers)))


def changed_head(plain: DecoderSpec, **values: Any) -> HeadSpec:
    """Return the decoder's head, which must exist, with other values."""
    assert plain.head is not None
    return replace(plain.head, **values)


def side_by_side(plain: DecoderSpec) -> DecoderSpec:
    """Return the decoder with parallel blocks: all blocks of a layer read the same residual through its first norm."""

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
