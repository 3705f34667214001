"""Decides which decoders one native call can compute, and builds the parts of their layers with weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pagemill_engine.decoders.expert_parts import gate_of, gating_of
from pagemill_engine.decoders.native.parts import Parts, norm_bytes
from pagemill_engine.decoders.row_order import latent_order, latent_query_order, norm_order, qkv_order
from pagemill_engine.decoders.tensors import read_stacked, read_tensor
from pagemill_kernels.decoder_layer.parts import (
    InputMLPParts,
    KeySource,
    LatentParts,
    LayerParts,
    MLPParts,
    MoEParts,
    NormParts,
    SharedExpertParts,
)
from pagemill_kernels.experts.native import NativeExperts
from pagemill_kernels.linear.native import NativeLinear
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BranchSpec,
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    ResidualSpec,
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
    first, second, *others = _branches(layer)
    attention, mlp = first.block, second.block
    assert isinstance(attention, AttentionSpec | LatentAttentionSpec)
    assert isinstance(mlp, MLPSpec | MoESpec)
    rope, is_parallel = attention.rope, len(layer.residuals) == 1
    # Parallel branches read the same input; the first norm serves both if they are equal.
    shares_norm = is_parallel and second.norm == first.norm
    if isinstance(attention, LatentAttentionSpec):
        own = _latent_parts(attention, parts)
    else:
        own = _attention_parts(attention, parts)
    made = LayerParts(
        **own,
        output=parts.linear(attention.output),
        mlp=_mlp_parts(mlp, parts) if isinstance(mlp, MLPSpec) else _moe_parts(mlp, parts),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        query_growth=attention.query_growth is not None,
        window=attention.window,
        rotation=None if rope is None else rotations.index((rope, attention.rotary_table_dim)),
        attention_norm=parts.norm(first.norm),
        mlp_norm=None if shares_norm else parts.norm(second.norm),
        attention_output_norm=parts.norm(first.output_norm),
        mlp_output_norm=parts.norm(second.output_norm),
        attention_residual_norm=None if is_parallel else parts.norm(layer.residuals[0].norm),
        residual_scale=first.scale,
        parallel=is_parallel,
        first_linear=first_linear,
    )
    return made if is_parallel else _with_others(made, layer.residuals[1:], others, parts)


def _with_others(
    made: LayerParts, residuals: Sequence[ResidualSpec], others: Sequence[BranchSpec], parts: Parts
) -> LayerParts:
    """Return a layer's parts with what follows its MLP or is beside that. `residuals`: from that of the MLP on."""
    beside = input_mlp = None
    for branch in others:
        if isinstance(branch.block, MoESpec):
            beside = _moe_parts(branch.block, parts)._replace(output_norm=parts.norm(branch.output_norm))
        else:
            assert isinstance(branch.block, MLPSpec)
            assert branch.block.layer_input is not None
            own = _mlp_parts(branch.block, parts)
            input_mlp = InputMLPParts(own, branch.block.layer_input, parts.norm(branch.output_norm))
    factor = residuals[-1].factor
    return made._replace(
        beside=beside,
        input_mlp=input_mlp,
        sum_norm=parts.norm(residuals[0].sum_norm),
        mlp_residual_norm=parts.norm(residuals[0].norm),
        factor=None if factor is None else read_tensor(parts.source, factor, (1,), "float32"),
    )


def _attention_parts(spec: AttentionSpec, parts: Parts) -> dict[str, Any]:
    """Return the members of `LayerParts` that plain attention has."""
    source: KeySource = "another" if spec.cache_layer is not None else "keys" if spec.values_are_keys else "own"
    return {
        "qkv": parts.linear(spec.qkv, qkv_order(spec)),
        "query_norm": _head_norm(spec, spec.query_norm, parts),
        "key_norm": _head_norm(spec, spec.key_norm, parts),
        "value_norm": parts.norm(spec.value_norm),
        "key_source": source,
        "sinks": None if spec.sinks is None else read_tensor(parts.source, spec.sinks, (spec.num_heads,), "float32"),
        "alibi_slopes": None if spec.alibi_slopes is None else np.array(spec.alibi_slopes, dtype=np.float32),
        "soft_cap": spec.soft_cap,
        "norms_behind_rotation": spec.norms_behind_rotation,
        "clip": spec.clip,
        "ahead": not spec.causal,
    }


def _latent_parts(spec: LatentAttentionSpec, parts: Parts) -> dict[str, Any]:
    """Return the members of `LayerParts` that attention over latents has. The matrix from latents to keys and values is
    divided by heads, to be multiplied into queries and results."""
    names = spec.up.weight_shapes()
    keeps = parts.ops.keeps_bfloat16 and all(map(parts.source.is_bfloat16, names))
    stacked = read_stacked(parts.source, names, "bfloat16" if keeps else parts.ops.weight_type)
    by_head = stacked.reshape(spec.num_heads, -1, spec.latent_size)
    norm = parts.norm(spec.latent_norm)
    assert norm is not None
    latent = LatentParts(
        query_down=None if spec.query_down is None else parts.linear(spec.query_down),
        query_norm=parts.norm(spec.query_norm),
        query=parts.linear(spec.query, latent_query_order(spec)),
        down=parts.linear(spec.down, latent_order(spec)),
        latent_norm=norm,
        keys=tuple(parts.ops.pack_linear(head[: spec.key_dim].T, None) for head in by_head),
        values=tuple(parts.ops.pack_linear(head[spec.key_dim :], None) for head in by_head),
        shared_size=spec.shared_size,
    )
    return {"qkv": latent}


def layer_bytes(layer: LayerParts) -> int:
    """Return the bytes of a layer's weights."""
    norms = [layer.attention_norm, layer.attention_output_norm, layer.attention_residual_norm, layer.query_norm]
    norms += [layer.key_norm, layer.value_norm, layer.mlp_norm, layer.mlp_output_norm, layer.mlp_residual_norm]
    norms.append(layer.sum_norm)
    vectors = [layer.sinks, layer.factor]
    matrices: list[NativeLinear | NativeExperts] = [layer.output]
    if isinstance(layer.qkv, LatentParts):
        matrices += layer.qkv.matrices
        norms += (layer.qkv.query_norm, layer.qkv.latent_norm)
    else:
        matrices.append(layer.qkv)
    mlps = (layer.mlp, layer.beside, None if layer.input_mlp is None else layer.input_mlp.mlp)
    for mlp in mlps:
        if isinstance(mlp, MLPParts):
            matrices += mlp[:2]
        elif mlp is not None:
            matrices += _matrices_of_experts(mlp)
            norms += (mlp.norm, mlp.router_norm, mlp.output_norm)
            vectors += (mlp.choice_bias, mlp.scales)
    norms += () if layer.input_mlp is None else (layer.input_mlp.output_norm,)
    held = sum(each.num_bytes for each in matrices) + sum(map(norm_bytes, norms))
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
        parts.norm(spec.norm),
        parts.norm(spec.router_norm),
        None
        if spec.expert_scales is None
        else read_tensor(parts.source, spec.expert_scales, (len(spec.experts),), "float32"),
    )


def _shared_parts(spec: SharedExpertSpec, parts: Parts) -> SharedExpertParts:
    return SharedExpertParts(_mlp_parts(spec.mlp, parts), None if spec.gate is None else parts.linear(spec.gate))


def _has_parts(layer: LayerSpec) -> bool:
    """Whether the layer is attention and an MLP or experts, in sequence or parallel; in sequence with an MLP beside the
    experts, or one behind that multiplies inputs of the layer."""
    if len(layer.residuals) == 1:
        return _is_parallel(layer.residuals[0])
    (attention, *more), *rest = (residual.branches for residual in layer.residuals)
    if (
        more
        or len(rest) > 2
        or not _is_attention(attention.block)
        or not _has_block(layer.residuals[1], attention.scale)
    ):
        return False
    if any(residual.factor is not None for residual in layer.residuals[:-1]) or layer.residuals[0].sum_norm is not None:
        return False
    return len(rest) == 1 or _multiplies_inputs(layer.residuals[2], attention.scale)


def _is_parallel(residual: ResidualSpec) -> bool:
    branches = residual.branches
    # Parallel branches must not read what the other has added, so their input must be a copy.
    if len(branches) != 2 or any(branch.norm is None for branch in branches):
        return False
    plain = (residual.norm, residual.sum_norm, residual.factor) == (None,) * 3
    scales = branches[0].scale == branches[1].scale
    return plain and scales and _is_attention(branches[0].block) and _is_mlp(branches[1].block)


def _has_block(residual: ResidualSpec, scale: float) -> bool:
    """Whether the residual is an MLP or experts, or an MLP and experts that read hidden states without a norm."""
    first, *others = residual.branches
    if not others:
        return first.scale == scale and residual.sum_norm is None and _is_mlp(first.block)
    experts = others[0]
    alone = len(others) == 1 and isinstance(first.block, MLPSpec) and isinstance(experts.block, MoESpec)
    return alone and experts.norm is None and first.scale == experts.scale == scale == 1.0 and _is_mlp(first.block)


def _multiplies_inputs(residual: ResidualSpec, scale: float) -> bool:
    (branch, *more) = residual.branches
    block = branch.block
    if more or not isinstance(block, MLPSpec) or block.layer_input is None or block.gated or block.limit is not None:
        return False
    return (residual.norm, residual.sum_norm, branch.norm) == (None,) * 3 and branch.scale == scale == 1.0


def _branches(layer: LayerSpec) -> list[BranchSpec]:
    return [branch for residual in layer.residuals for branch in residual.branches]


def _is_attention(block: object) -> bool:
    """Whether it is attention over latents, or over keys and values with optional norms, sinks, caps and slopes."""
    if not isinstance(block, AttentionSpec):
        return isinstance(block, LatentAttentionSpec)
    if block.gated or block.head_gates is not None or (block.alibi_slopes is not None and not block.causal):
        return False
    return block.cache_layer is None or not (block.norms_behind_rotation or block.clip is not None)


def _is_mlp(block: object) -> bool:
    return isinstance(block, MoESpec) or (isinstance(block, MLPSpec) and block.layer_input is None)
