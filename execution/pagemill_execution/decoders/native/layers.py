"""Decides which decoders one native call can compute, and builds the parts of their layers with weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pagemill_execution.decoders.expert_parts import gate_of, gating_of
from pagemill_execution.decoders.native.parts import Parts, norm_bytes
from pagemill_execution.decoders.native.recurrent import recurrent_parts
from pagemill_execution.decoders.row_order import latent_order, latent_query_order, norm_order, qkv_order
from pagemill_execution.decoders.tensors import read_stacked, read_tensor
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
from pagemill_models.declaration.caches import RecurrentSpec
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
    made = LayerParts(first_linear=first_linear)
    number = 0
    mixers: list[BranchSpec] = []
    for branch in _branches(layer):
        block = branch.block
        if isinstance(block, RecurrentSpec):
            made = made._replace(recurrent=recurrent_parts(branch, block, parts))
        elif isinstance(block, AttentionSpec | LatentAttentionSpec):
            made = _with_attention(made, branch, block, rotations, parts)._replace(first_attention=number)
        elif isinstance(block, MLPSpec) and block.layer_input is not None:
            own = InputMLPParts(_mlp_parts(block, parts), block.layer_input, parts.norm(branch.output_norm))
            made = made._replace(input_mlp=own)
        elif made.mlp is not None:
            assert isinstance(block, MoESpec)
            made = made._replace(beside=_moe_parts(block, parts)._replace(output_norm=parts.norm(branch.output_norm)))
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
    return made if len(layer.residuals) == 1 else _with_residuals(made, layer.residuals, parts)


def _with_residuals(made: LayerParts, residuals: Sequence[ResidualSpec], parts: Parts) -> LayerParts:
    """Return a layer's parts with what is done to the residual stream behind its blocks."""
    mixer, mlp = residuals[:2]
    factor = residuals[-1].factor
    return made._replace(
        attention_residual_norm=parts.norm(mixer.norm),
        sum_norm=parts.norm(mlp.sum_norm),
        mlp_residual_norm=parts.norm(mlp.norm),
        factor=None if factor is None else read_tensor(parts.source, factor, (1,), "float32"),
    )


def _with_attention(
    made: LayerParts,
    branch: BranchSpec,
    attention: AttentionSpec | LatentAttentionSpec,
    rotations: list[tuple[RopeSpec, int]],
    parts: Parts,
) -> LayerParts:
    rope = attention.rope
    if isinstance(attention, LatentAttentionSpec):
        own = _latent_parts(attention, parts)
    else:
        own = _attention_parts(attention, parts)
    return made._replace(
        **own,
        output=parts.linear(attention.output),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        query_growth=attention.query_growth is not None,
        window=attention.window,
        rotation=None if rope is None else rotations.index((rope, attention.rotary_table_dim)),
        attention_norm=parts.norm(branch.norm),
        attention_output_norm=parts.norm(branch.output_norm),
        residual_scale=branch.scale,
    )


def _attention_parts(spec: AttentionSpec, parts: Parts) -> dict[str, Any]:
    """Return the members of `LayerParts` that plain attention has."""
    source: KeySource = "another" if spec.cache_layer is not None else "keys" if spec.values_are_keys else "own"
    return {
        "qkv": parts.linear(spec.qkv, qkv_order(spec)),
        "head_gates": None if spec.head_gates is None else parts.linear(spec.head_gates),
        "gated": spec.gated,
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
    recurrent = layer.recurrent
    norms = [layer.attention_norm, layer.attention_output_norm, layer.attention_residual_norm, layer.query_norm]
    norms += [layer.key_norm, layer.value_norm, layer.mlp_norm, layer.mlp_output_norm, layer.mlp_residual_norm]
    norms.append(layer.sum_norm)
    vectors = [layer.sinks, layer.factor]
    matrices: list[NativeLinear | NativeExperts | None] = [layer.output, layer.head_gates]
    if recurrent is not None:
        matrices += recurrent.matrices()
        norms += [recurrent.norm, recurrent.output_norm]
        vectors += recurrent.vectors()
    if isinstance(layer.qkv, LatentParts):
        matrices += layer.qkv.matrices
        norms += (layer.qkv.query_norm, layer.qkv.latent_norm)
    else:
        matrices.append(layer.qkv)
    for mlp in (layer.mlp, layer.beside, None if layer.input_mlp is None else layer.input_mlp.mlp):
        matrices += _matrices_of(mlp)
        if isinstance(mlp, MoEParts):
            norms += (mlp.norm, mlp.router_norm, mlp.output_norm)
            vectors += (mlp.choice_bias, mlp.scales)
    norms += () if layer.input_mlp is None else (layer.input_mlp.output_norm,)
    held: int = sum(each.num_bytes for each in matrices if each is not None) + sum(map(norm_bytes, norms))
    return held + sum(each.nbytes for each in vectors if each is not None)


def _matrices_of(mlp: MLPParts | MoEParts | None) -> Iterator[NativeLinear | NativeExperts]:
    if mlp is None:
        return
    if isinstance(mlp, MLPParts):
        yield from mlp[:2]
        return
    yield from (mlp.router, mlp.experts, *(mlp.around or ()))
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
        around=None
        if spec.before is None or spec.behind is None
        else (parts.linear(spec.before), parts.linear(spec.behind)),
    )


def _shared_parts(spec: SharedExpertSpec, parts: Parts) -> SharedExpertParts:
    return SharedExpertParts(_mlp_parts(spec.mlp, parts), None if spec.gate is None else parts.linear(spec.gate))


def _has_parts(layer: LayerSpec) -> bool:
    """Whether the layer's blocks are in one of `_ORDERS`, with no more around them than `LayerParts` has."""
    sizes = tuple(len(each.branches) for each in layer.residuals)
    kinds = "".join(_kind(each.block) for each in _branches(layer))
    if kinds not in _ORDERS.get(sizes, ()):
        return False
    if kinds.startswith("am") and len(sizes) > 1:
        return _has_residuals(layer.residuals)
    if any((each.norm, each.sum_norm, each.factor) != (None,) * 3 for each in layer.residuals):
        return False
    # Parallel branches must not read what the other has added, so their input must be a copy.
    return all(len(each.branches) == 1 or all(own.norm for own in each.branches) for each in layer.residuals)


_ORDERS = {
    (1,): ("a", "r", "m"),
    (2,): ("am", "ra"),
    (1, 1): ("am", "rm"),
    (2, 1): ("ram",),
    (1, 2): ("amm",),
    (1, 1, 1): ("ami",),
    (1, 2, 1): ("ammi",),
}
"""The blocks of layers by the number of branches of their residuals: attention, recurrent, MLP or experts, an MLP that
multiplies inputs of the layer."""


def _kind(block: object) -> str:
    if isinstance(block, RecurrentSpec):
        return "r"
    if isinstance(block, MLPSpec):
        return "m" if block.layer_input is None else "i"
    if isinstance(block, MoESpec):
        return "m"
    return "a" if _is_attention(block) else "?"


def _has_residuals(residuals: Sequence[ResidualSpec]) -> bool:
    """Whether norms and factors are where `LayerParts` has them, of attention, an MLP and what is beside or behind."""
    attention, mlp, *others = residuals
    if attention.sum_norm is not None or any(each.factor is not None for each in residuals[:-1]):
        return False
    scales = {branch.scale for residual in residuals for branch in residual.branches}
    first, *beside = mlp.branches
    if beside:
        of_kinds = isinstance(first.block, MLPSpec) and isinstance(beside[0].block, MoESpec)
        if not of_kinds or beside[0].norm is not None or scales != {1.0}:
            return False
    elif mlp.sum_norm is not None:
        return False
    return not others or (scales == {1.0} and _multiplies_inputs(others[0]))


def _multiplies_inputs(residual: ResidualSpec) -> bool:
    (branch,) = residual.branches
    block = branch.block
    assert isinstance(block, MLPSpec)
    plain = (residual.norm, residual.sum_norm, branch.norm, block.limit) == (None,) * 4
    return plain and not block.gated


def _branches(layer: LayerSpec) -> list[BranchSpec]:
    return [branch for residual in layer.residuals for branch in residual.branches]


def _is_attention(block: object) -> bool:
    """Whether it is attention over latents, or over keys and values with norms, gates, sinks, caps and slopes."""
    if not isinstance(block, AttentionSpec):
        return isinstance(block, LatentAttentionSpec)
    if block.alibi_slopes is not None and not block.causal:
        return False
    has_gates = block.gated or block.head_gates is not None
    if has_gates and (block.cache_layer is not None or block.values_are_keys):
        return False
    return block.cache_layer is None or not (block.norms_behind_rotation or block.clip is not None)
