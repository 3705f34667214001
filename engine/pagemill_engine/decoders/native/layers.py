"""Decides which decoders one native call can compute, and builds the parts of their layers with weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagemill_engine.decoders.expert_parts import gate_of, gating_of
from pagemill_engine.decoders.native.parts import Parts, norm_bytes
from pagemill_engine.decoders.native.recurrent import recurrent_parts
from pagemill_engine.decoders.row_order import norm_order, qkv_order
from pagemill_engine.decoders.tensors import read_tensor
from pagemill_kernels.decoder_layer.parts import LayerParts, MLPParts, MoEParts, NormParts, SharedExpertParts
from pagemill_kernels.experts.native import NativeExperts
from pagemill_kernels.linear.native import NativeLinear
from pagemill_models.declaration.caches import RecurrentSpec
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
    made = LayerParts(first_linear=first_linear)
    number = 0
    mixers: list[BranchSpec] = []
    for branch in _branches(layer):
        block = branch.block
        if isinstance(block, RecurrentSpec):
            made = made._replace(recurrent=recurrent_parts(branch, block, parts))
        elif isinstance(block, AttentionSpec):
            made = _with_attention(made, branch, block, rotations, parts)._replace(first_attention=number)
        else:
            assert isinstance(block, MLPSpec | MoESpec)
            # Parallel branches read the same input; the first norm serves both if they are equal.
            is_parallel = bool(mixers) and len(layer.residuals) == 1
            shares_norm = is_parallel and branch.norm == mixers[0].norm
            made = made._replace(
                mlp=_mlp_parts(block, parts) if isinstance(block, MLPSpec) else _moe_parts(block, parts),
                mlp_norm=None if shares_norm else parts.norm(branch.norm),
                mlp_output_norm=parts.norm(branch.output_norm),
                mlp_scale=branch.scale,
                parallel=is_parallel,
                first_mlp=number,
            )
        mixers.append(branch)
        number += sum(1 for _ in block.linears())
    return made


def _with_attention(
    made: LayerParts,
    branch: BranchSpec,
    attention: AttentionSpec,
    rotations: list[tuple[RopeSpec, int]],
    parts: Parts,
) -> LayerParts:
    rope = attention.rope
    return made._replace(
        qkv=parts.linear(attention.qkv, qkv_order(attention)),
        output=parts.linear(attention.output),
        head_gates=None if attention.head_gates is None else parts.linear(attention.head_gates),
        gated=attention.gated,
        query_norm=_head_norm(attention, attention.query_norm, parts),
        key_norm=_head_norm(attention, attention.key_norm, parts),
        sinks=None
        if attention.sinks is None
        else read_tensor(parts.source, attention.sinks, (attention.num_heads,), "float32"),
        alibi_slopes=None if attention.alibi_slopes is None else np.array(attention.alibi_slopes, dtype=np.float32),
        soft_cap=attention.soft_cap,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        norms_behind_rotation=attention.norms_behind_rotation,
        query_growth=attention.query_growth is not None,
        clip=attention.clip,
        window=attention.window,
        rotation=None if rope is None else rotations.index((rope, attention.rotary_table_dim)),
        attention_norm=parts.norm(branch.norm),
        attention_output_norm=parts.norm(branch.output_norm),
        residual_scale=branch.scale,
    )


def layer_bytes(layer: LayerParts) -> int:
    """Return the bytes of a layer's weights."""
    mlp, recurrent = layer.mlp, layer.recurrent
    matrices = [layer.qkv, layer.output, layer.head_gates]
    norms = [layer.attention_norm, layer.mlp_norm, layer.attention_output_norm, layer.mlp_output_norm]
    vectors = [layer.sinks, mlp.choice_bias if isinstance(mlp, MoEParts) else None]
    if recurrent is not None:
        matrices += recurrent.matrices()
        norms += [recurrent.norm, recurrent.output_norm]
        vectors += recurrent.vectors()
    held: int = sum(each.num_bytes for each in matrices if each is not None)
    held += sum(each.num_bytes for each in _matrices_of(mlp))
    held += sum(map(norm_bytes, (*norms, layer.query_norm, layer.key_norm)))
    return held + sum(each.nbytes for each in vectors if each is not None)


def _matrices_of(mlp: MLPParts | MoEParts | None) -> Iterator[NativeLinear | NativeExperts]:
    if mlp is None:
        return
    if isinstance(mlp, MLPParts):
        yield from mlp[:2]
        return
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
    """Whether the layer is a mixer and an MLP or experts, or one of them, in sequence or parallel, without a norm
    behind their sum. The mixer is attention or keeps a state, or both side by side."""
    branches = _branches(layer)
    if any((each.norm, each.sum_norm, each.factor) != (None,) * 3 for each in layer.residuals):
        return False
    sizes, kinds = [len(each.branches) for each in layer.residuals], "".join(_kind(each.block) for each in branches)
    if kinds not in _ORDERS.get(tuple(sizes), ()):
        return False
    # Parallel branches must not read what the other has added, so their input must be a copy.
    return all(len(each.branches) == 1 or all(own.norm for own in each.branches) for each in layer.residuals)


_ORDERS = {
    (1,): ("a", "r", "m"),
    (2,): ("am", "ra"),
    (1, 1): ("am", "rm"),
    (2, 1): ("ram",),
}
"""The blocks of layers by the number of branches of their residuals: attention, recurrent, MLP."""


def _kind(block: object) -> str:
    if _is_plain_attention(block):
        return "a"
    if isinstance(block, RecurrentSpec):
        return "r"
    return "m" if _is_plain_mlp(block) else "?"


def _branches(layer: LayerSpec) -> list[BranchSpec]:
    return [branch for residual in layer.residuals for branch in residual.branches]


def _is_plain_attention(block: object) -> bool:
    """Whether it is attention over cached keys and values, with optional norms, gates, sinks, caps and slopes."""
    if not isinstance(block, AttentionSpec):
        return False
    return block.key_parts == 2 and block.value_norm is None and block.causal


def _is_plain_mlp(block: object) -> bool:
    if isinstance(block, MLPSpec):
        return block.layer_input is None
    own = (block.norm, block.router_norm, block.expert_scales, block.before) if isinstance(block, MoESpec) else ()
    return own == (None,) * 4
