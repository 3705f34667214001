"""Decides which decoders one native call can compute, and builds the parts of their layers with weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagemill_engine.decoders.expert_parts import gate_of, gating_of
from pagemill_engine.decoders.native.parts import Parts, norm_bytes
from pagemill_engine.decoders.row_order import norm_order, qkv_order
from pagemill_engine.decoders.tensors import read_tensor
from pagemill_kernels.decoder_layer.parts import LayerParts, MLPParts, MoEParts, NormParts, SharedExpertParts
from pagemill_kernels.experts.native import NativeExperts
from pagemill_kernels.linear.native import NativeLinear
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BranchSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    RopeSpec,
    SharedExpertSpec,
)
from pagemill_models.declaration.matrices import QueryGrowth


def can_fuse(decoder: DecoderSpec) -> bool:
    """Whether `LayerParts` can describe all layers."""
    return all(map(_has_parts, decoder.layers)) and len(query_growths(decoder)) <= 1


def query_growths(decoder: DecoderSpec) -> set[QueryGrowth]:
    """Return the different growths of the layers' queries."""
    found = (each.query_growth for each in decoder.attentions())
    return {each for each in found if each is not None}


def layer_parts(layer: LayerSpec, rotations: list[tuple[RopeSpec, int]], first_linear: int, parts: Parts) -> LayerParts:
    """Return the parts of a layer with its weights, for a decoder that can be fused.

    `rotations`: the decoder's. `first_linear`: as in `LayerParts`.
    """
    first, second = _branches(layer)
    attention, mlp = first.block, second.block
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MLPSpec | MoESpec)
    rope, is_parallel = attention.rope, len(layer.residuals) == 1
    # Parallel branches read the same input; the first norm serves both if they are equal.
    shares_norm = is_parallel and second.norm == first.norm
    return LayerParts(
        qkv=parts.linear(attention.qkv, qkv_order(attention)),
        output=parts.linear(attention.output),
        query_norm=_head_norm(attention, attention.query_norm, parts),
        key_norm=_head_norm(attention, attention.key_norm, parts),
        sinks=None
        if attention.sinks is None
        else read_tensor(parts.source, attention.sinks, (attention.num_heads,), "float32"),
        alibi_slopes=None if attention.alibi_slopes is None else np.array(attention.alibi_slopes, dtype=np.float32),
        soft_cap=attention.soft_cap,
        mlp=_mlp_parts(mlp, parts) if isinstance(mlp, MLPSpec) else _moe_parts(mlp, parts),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        norms_behind_rotation=attention.norms_behind_rotation,
        query_growth=attention.query_growth is not None,
        clip=attention.clip,
        window=attention.window,
        rotation=None if rope is None else rotations.index((rope, attention.rotary_table_dim)),
        attention_norm=parts.norm(first.norm),
        mlp_norm=None if shares_norm else parts.norm(second.norm),
        attention_output_norm=parts.norm(first.output_norm),
        mlp_output_norm=parts.norm(second.output_norm),
        residual_scale=first.scale,
        parallel=is_parallel,
        first_linear=first_linear,
    )


def layer_bytes(layer: LayerParts) -> int:
    """Return the bytes of a layer's weights."""
    mlp = layer.mlp
    matrices = (layer.qkv, layer.output, *(mlp[:2] if isinstance(mlp, MLPParts) else _matrices_of_experts(mlp)))
    norms = (layer.attention_norm, layer.mlp_norm, layer.attention_output_norm, layer.mlp_output_norm)
    held: int = sum(each.num_bytes for each in matrices)
    held += sum(map(norm_bytes, (*norms, layer.query_norm, layer.key_norm)))
    vectors = (layer.sinks, None if isinstance(mlp, MLPParts) else mlp.choice_bias)
    return held + sum(each.nbytes for each in vectors if each is not None)


def _matrices_of_experts(mlp: MoEParts) -> Iterator[NativeLinear | NativeExperts]:
    yield from (mlp.router, mlp.experts)
    if mlp.shared is not None:
        yield from mlp.shared.mlp[:2]
        if mlp.shared.gate is not None:
            yield mlp.shared.gate


def _head_norm(attention: AttentionSpec, norm: NormSpec | None, parts: Parts) -> NormParts | None:
    return None if norm is None else parts.norm(norm, norm_order(attention, norm.size))


def _mlp_parts(spec: MLPSpec, parts: Parts) -> MLPParts:
    return MLPParts(parts.linear(spec.up), parts.linear(spec.down), spec.activation, spec.gated, spec.limit)


def _moe_parts(spec: MoESpec, parts: Parts) -> MoEParts:
    router = parts.linear(spec.router)
    packed = [(parts.linear(expert.up), parts.linear(expert.down)) for expert in spec.experts]
    ups, downs = zip(*packed, strict=True)
    bias = None
    if spec.gating is not None and spec.gating.bias is not None:
        bias = read_tensor(parts.source, spec.gating.bias, (len(spec.experts),), "float32")
    return MoEParts(
        router,
        NativeExperts(ups, downs, gate_of(spec)),
        spec.top_k,
        spec.renormalized,
        gating_of(spec),
        bias,
        None if spec.shared is None else _shared_parts(spec.shared, parts),
    )


def _shared_parts(spec: SharedExpertSpec, parts: Parts) -> SharedExpertParts:
    return SharedExpertParts(_mlp_parts(spec.mlp, parts), None if spec.gate is None else parts.linear(spec.gate))


def _has_parts(layer: LayerSpec) -> bool:
    """Whether the layer is attention and an MLP or experts, in sequence or parallel, without a norm behind their
    sum."""
    branches = _branches(layer)
    blocks = [branch.block for branch in branches]
    if len(blocks) != 2 or any((each.norm, each.sum_norm, each.factor) != (None,) * 3 for each in layer.residuals):
        return False
    # Parallel branches must not read what the other has added, so their input must be a copy.
    if len(layer.residuals) == 1 and any(branch.norm is None for branch in branches):
        return False
    return branches[0].scale == branches[1].scale and _is_plain_attention(blocks[0]) and _is_plain_mlp(blocks[1])


def _branches(layer: LayerSpec) -> list[BranchSpec]:
    return [branch for residual in layer.residuals for branch in residual.branches]


def _is_plain_attention(block: object) -> bool:
    """Whether it is attention over cached keys and values, with optional norms, sinks, caps and slopes."""
    if not isinstance(block, AttentionSpec):
        return False
    if block.key_parts != 2 or block.value_norm is not None or block.gated or block.head_gates is not None:
        return False
    return block.causal


def _is_plain_mlp(block: object) -> bool:
    if isinstance(block, MLPSpec):
        return block.layer_input is None
    own = (block.norm, block.router_norm, block.expert_scales, block.before) if isinstance(block, MoESpec) else ()
    return own == (None,) * 4
